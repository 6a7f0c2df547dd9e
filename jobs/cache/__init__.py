"""The cache folder of a host, and the digests of files that are remembered in it."""
