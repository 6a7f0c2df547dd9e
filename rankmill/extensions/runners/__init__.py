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
"""The commands by name, each with its group in the help, the first line of its help, and its function; an
entry point of ``rankmill.commands`` points here.
"""
