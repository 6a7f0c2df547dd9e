"""Claims jobs from the queue, renews their leases, and hands back what the worker does not score."""
