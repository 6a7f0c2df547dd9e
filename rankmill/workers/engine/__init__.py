"""The engine, which tokenizes pairs, cuts batches, runs them, and puts the scores in row order."""
