"""Processes of this host: an embedded server, and workers that are kept running."""
