"""Files and batches in the form of OpenAI's API; runners score the requests in them."""
