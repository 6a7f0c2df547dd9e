"""Submitted runs: files that a runner scores, while the process that submitted them may be gone."""
