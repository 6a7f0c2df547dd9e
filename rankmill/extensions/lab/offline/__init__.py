"""What the laboratory and the registry do with a model, in a process that imports a worker's libraries."""
