"""Commands that measure precision and speed."""
