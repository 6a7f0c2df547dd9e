"""Scores or measures models without a queue."""
