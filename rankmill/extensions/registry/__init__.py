"""Models by name: versions, aliases, splits and shadows."""

COMMANDS = {
    "models": (
        "Models",
        "Look at models, and keep them in a registry.",
        "rankmill.extensions.registry.commands.models:models",
    ),
}
"""What an entry point of ``rankmill.commands`` names: each command's purpose, the first line of its help, and
its function.
"""
