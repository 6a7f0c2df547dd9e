"""The client, and the runs that its callers hold."""
