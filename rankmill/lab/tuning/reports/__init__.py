"""Reports of experiments: statistics, plots, tables."""
