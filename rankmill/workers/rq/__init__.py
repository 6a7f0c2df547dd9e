"""RQ's worker, jobs and registries as a ScoringWorker has them; no other part of a worker overrides RQ."""
