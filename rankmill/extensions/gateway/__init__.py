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
"""The commands by name, each with its group in the help, the first line of its help, and its function; an
entry point of ``rankmill.commands`` points here.
"""
