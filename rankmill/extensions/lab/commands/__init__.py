"""Commands that measure precision and speed, and that make models for 8 bits."""
