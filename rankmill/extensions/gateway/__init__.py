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
"""The gateway's commands by name, each with its group in the help of ``rankmill``, the first line of its own
help, and the place of its function. An entry point of ``rankmill.commands`` points here.
"""
