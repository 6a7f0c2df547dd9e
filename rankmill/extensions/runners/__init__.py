"""Submitted runs: files that are scored by runners, wherever they are, and the webhooks of their end."""

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
