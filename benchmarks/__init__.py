"""Measurements, one command each. Nothing here runs in the tests."""
