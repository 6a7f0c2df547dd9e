"""Backends, which run models: each in a folder of its own, beside the modules that they share."""
