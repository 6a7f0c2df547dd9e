"""Formats of files: each module has a format's reader and writer, and `table` finds them all."""
