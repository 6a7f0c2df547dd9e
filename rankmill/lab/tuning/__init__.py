"""Experiments and tuning: measure settings in fresh workers, report them, find the best ones."""
