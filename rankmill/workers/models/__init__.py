"""Models: loading them, and tokenizing text for them."""
