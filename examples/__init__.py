"""Producers, recipes and plugins, with example pairs, a demo model, and the scripts that train and measure
it.
"""
