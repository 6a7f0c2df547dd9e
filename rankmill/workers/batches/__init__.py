"""The tokens of rows, and how rows are cut into batches."""
