"""The commands; each is a module."""
