"""OpenAI's files and batches: requests in a file, scored by runners."""
