"""Scores files from end to end: the input, the run, the output, and the report."""
