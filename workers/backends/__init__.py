"""What runs a model: one module or folder for each backend."""
