"""Specs, runs, the wire format, results, errors, and names of keys and jobs, which all processes share."""
