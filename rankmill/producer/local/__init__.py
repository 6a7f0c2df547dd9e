"""Starts an embedded server, and workers that are kept running, as processes of this host."""
