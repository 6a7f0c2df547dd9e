"""Backends, which run models. Each has a folder of its own, beside the modules that they share."""
