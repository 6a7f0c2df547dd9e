"""What every process of rankmill starts with: settings, connection, logs, traces, an HTTP listener."""
