"""Models by name, with versions, aliases, splits and shadows."""

COMMANDS = {
    "models": (
        "Models",
        "Describe and prove models, and keep them in a registry.",
        "rankmill.extensions.registry.commands.models:models",
    ),
}
"""The `rankmill` commands that this extension adds, by name. Each has its group in the help, the first line
of its help, and its function. An entry point of ``rankmill.commands`` points to this dictionary.
"""
