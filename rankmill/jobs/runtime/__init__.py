"""Settings, connections, logs, traces and an HTTP server for all of rankmill's processes."""
