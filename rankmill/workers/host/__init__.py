"""Finds the worker's device and a model's files, keeps cached files, and serves health and metrics."""
