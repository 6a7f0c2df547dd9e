"""Runs whose texts are in files of their own: queries, and a corpus that may be larger than memory."""
