"""Scores over HTTP, in the dialects that clients of rerank servers speak."""

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
"""For the seam ``rankmill.commands``: purpose, first line of the help, and where the command is."""
