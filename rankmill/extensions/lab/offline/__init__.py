"""Tasks on a model, such as to calibrate or to prove it, for a process that imports a worker's libraries."""
