"""Runs that outlive the process that submitted them."""
