"""Commands for files of scores."""
