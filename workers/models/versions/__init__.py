"""Versions of a registry's models on this host: fetched once, verified, and removed when there is no room."""
