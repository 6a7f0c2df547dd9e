"""Files and batches: requests by the file, which runners work on whatever becomes of the gateway."""
