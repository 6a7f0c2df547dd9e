"""Producers, which cut files and requests into chunks, enqueue them and collect the scores."""
