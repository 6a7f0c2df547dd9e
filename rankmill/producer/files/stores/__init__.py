"""Files in object stores, at URLs such as s3://bucket/key, through fsspec."""
