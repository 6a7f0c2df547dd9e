"""Commands for the registry of models."""
