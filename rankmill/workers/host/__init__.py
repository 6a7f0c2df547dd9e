"""The worker's environment: its device, its memory, its caches, its metrics."""
