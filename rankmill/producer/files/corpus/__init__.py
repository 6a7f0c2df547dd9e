"""Reads rankings of ids, and looks up their texts in files of queries and of a corpus. The corpus may be
larger than memory.
"""
