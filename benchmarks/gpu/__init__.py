"""Measures everything that is claimed of GPUs, by one command (`benchmarks.gpu.__main__`)."""
