"""What people do with a registry: push and pull versions, set aliases, remove, compare."""
