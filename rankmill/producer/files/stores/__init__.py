"""Object stores: files at URLs such as s3://bucket/key, through fsspec."""
