"""Input files, output files, and the folder of an interrupted run."""
