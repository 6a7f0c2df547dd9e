"""Scores files, from finding the input to the report on the output."""
