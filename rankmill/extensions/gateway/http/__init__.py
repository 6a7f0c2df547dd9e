"""The gateway's HTTP paths, the middleware of every request, and the ways to send answers."""
