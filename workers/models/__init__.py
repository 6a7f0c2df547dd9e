"""Models: loading them, and turning text into their tokens."""
