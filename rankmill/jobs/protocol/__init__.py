"""The state in Redis of runs, abandoned jobs, jobs that are set aside, and workers."""
