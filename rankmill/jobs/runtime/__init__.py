"""What every rankmill process uses: settings, connection, logs, traces, an HTTP listener."""
