"""Training data from scored runs."""
