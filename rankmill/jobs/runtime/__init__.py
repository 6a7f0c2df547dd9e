"""Shared parts of every rankmill process: settings, connection, logs, traces, an HTTP listener."""
