"""Rows' tokens, and how they are cut into batches."""
