"""A worker's side of the queue: jobs, claims and their leases, refusals, stopping."""
