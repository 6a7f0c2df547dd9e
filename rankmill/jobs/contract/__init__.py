"""What all processes share: specs, runs, the wire format, results, errors, and names of keys and jobs."""
