"""Submitted runs, which runners score on any host, and the webhooks at their end."""

COMMANDS = {
    "submit": (
        "Score",
        "Hand INPUT files to runners, which score their rows.",
        "rankmill.extensions.runners.commands.submit:submit",
    ),
    "runner": (
        "Serve",
        "Score submitted files, one after the other.",
        "rankmill.extensions.runners.commands.runner:runner",
    ),
}
"""The `rankmill` commands that this extension adds, by name. Each has its group in the help, the first line
of its help, and its function. An entry point of ``rankmill.commands`` points to this dictionary.
"""
