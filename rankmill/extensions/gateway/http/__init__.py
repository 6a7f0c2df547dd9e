"""What every HTTP request passes through, and the paths that belong to no dialect."""
