"""Loads models, and tokenizes text for them."""
