"""Models by name: versions, aliases, splits and shadows."""

COMMANDS = {
    "models": (
        "Models",
        "Look at models, and keep them in a registry.",
        "rankmill.extensions.registry.commands.models:models",
    ),
}
"""For the seam ``rankmill.commands``: purpose, first line of the help, and where the command is."""
