"""Holds the tokens of rows, cuts rows into batches, and reads how a model is applied to a row."""
