"""A worker's side of the queue: claiming jobs, leases, refusals, and stopping."""
