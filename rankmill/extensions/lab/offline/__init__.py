"""What the laboratory and the registry do with a model in a process that has a worker's libraries."""
