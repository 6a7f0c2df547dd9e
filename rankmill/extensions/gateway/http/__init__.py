"""The parts of HTTP that every request passes through, and the paths that do not belong to a dialect."""
