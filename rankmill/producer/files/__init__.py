"""Input files, output files, and the folder that keeps the work of a run."""
