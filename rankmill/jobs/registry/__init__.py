"""A registry of models: a folder, here or at a URL, with versions that never change and aliases that do."""
