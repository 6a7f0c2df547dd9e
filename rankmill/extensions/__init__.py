"""What plugs into the core: each folder is complete, and is found by the entry points of pyproject.toml."""
