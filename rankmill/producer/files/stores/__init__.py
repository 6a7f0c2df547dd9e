"""Reads and writes files of this host and, through fsspec, objects in stores such as ``s3://bucket/key``."""
