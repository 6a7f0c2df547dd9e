"""Runners: processes that score submitted files, one at a time, as score-file does."""
