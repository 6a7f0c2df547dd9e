"""The worker's environment: its device, cached files, models' files, health and metrics."""
