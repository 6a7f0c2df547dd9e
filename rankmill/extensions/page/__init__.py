"""The live page: the state of the cluster in a browser."""
