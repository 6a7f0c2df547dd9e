"""The live page, which shows the state of the cluster in a browser."""
