"""Scores submitted files on any host that has a runner, and sends webhooks when their runs end."""

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
"""Commands to add to `rankmill`: their help group, first line of help, and function. The entry point for
``rankmill.commands`` names this dictionary.
"""
