"""Rankings whose texts are in files of queries, and of a corpus that may be larger than memory."""
