"""The client, and runs as their callers hold them."""
