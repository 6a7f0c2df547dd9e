"""Reads and writes files of this host, and objects in stores, at URLs such as s3://bucket/key, through
fsspec.
"""
