"""The backends that run models, one folder each, and the modules that they share."""
