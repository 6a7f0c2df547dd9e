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
"""For the seam ``rankmill.commands``: purpose, first line of the help, and where the command is."""
