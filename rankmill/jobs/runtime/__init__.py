"""What rankmill's processes share at run time: settings, connection, logs, traces, an HTTP server."""
