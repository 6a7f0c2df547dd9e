"""Commands of submitted runs."""
