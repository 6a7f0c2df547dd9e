"""Submitted runs: files that runners score on any host, and the webhooks at their end."""

COMMANDS = {
    "submit": (
        "Score",
        "Hand INPUT files to runners, which score their pairs.",
        "rankmill.extensions.runners.commands.submit:submit",
    ),
    "runner": (
        "Serve",
        "Score submitted files, one after the other.",
        "rankmill.extensions.runners.commands.runner:runner",
    ),
}
"""What an entry point of ``rankmill.commands`` names: each command's purpose, the first line of its help, and
its function.
"""
