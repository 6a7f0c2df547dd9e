"""Parts of HTTP that every request passes, and the paths that do not belong to a dialect."""
