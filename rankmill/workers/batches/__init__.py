"""The tokens of rows, how rows are cut into batches, and how a model is applied to a row."""
