"""State in Redis: runs, abandoned jobs, jobs that are set aside, and workers' reports."""
