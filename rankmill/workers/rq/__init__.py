"""RQ's worker, jobs and registries as a ScoringWorker uses them; no other module of a worker overrides RQ."""
