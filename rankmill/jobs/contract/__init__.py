"""What producers and workers share: specs, runs, the wire format, results, errors, names of keys and jobs."""
