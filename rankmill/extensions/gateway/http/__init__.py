"""The gateway's HTTP: what every request passes through, the paths, and how answers are sent."""
