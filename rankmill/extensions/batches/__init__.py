"""OpenAI's files and batches, whose requests runners score."""
