"""Tasks of the laboratory and of the registry for a process that imports a worker's libraries."""
