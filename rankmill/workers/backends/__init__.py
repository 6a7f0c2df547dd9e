"""Runs models by backends; each backend has a folder of its own, beside the modules that all share."""
