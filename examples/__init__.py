"""Producers, recipes, plugins; example pairs, a demo model, and the scripts that trained and measure it."""
