"""Extensions, one in each folder; the core finds them by the entry points in pyproject.toml."""
