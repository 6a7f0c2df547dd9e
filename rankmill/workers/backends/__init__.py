"""Backends, which run models. Each backend has a folder of its own, beside the modules that all backends
share.
"""
