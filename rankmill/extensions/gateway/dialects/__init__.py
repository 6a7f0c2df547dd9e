"""The HTTP interfaces of other rerank services, one module for each: translation, and nothing else."""
