"""The gateway: an HTTP server that scores texts, with the paths and JSON forms of other rerank services."""

COMMANDS = {
    "serve": (
        "Serve",
        "Serve scores over HTTP and gRPC, as rerank servers do.",
        "rankmill.extensions.gateway.commands.serve:serve",
    ),
    "keys": (
        "Serve",
        "Make, list and revoke the API keys of the gateway.",
        "rankmill.extensions.gateway.commands.keys:keys",
    ),
}
"""The gateway's commands. Each has its group and its line in ``rankmill --help``, and its function's path.

The entry point ``gateway`` of the group ``rankmill.commands`` names this table.
"""
