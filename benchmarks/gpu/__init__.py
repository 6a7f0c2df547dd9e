"""Everything that is claimed of GPUs, measured by one command (`benchmarks.gpu.__main__`)."""
