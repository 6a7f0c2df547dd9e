"""State in Redis: runs, abandoned jobs, jobs set aside, workers' reports."""
