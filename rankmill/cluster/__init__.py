"""Shows the state of the cluster to people and to Prometheus, and gives orders to workers."""
