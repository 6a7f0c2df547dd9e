"""The HTTP interfaces of other rerank services, with one module for each; these only translate."""
