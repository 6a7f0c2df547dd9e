"""What the rest of a worker stands on: its device, its memory, its caches, its metrics."""
