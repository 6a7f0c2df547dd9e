"""Reports of experiments: figures, plots, tables."""
