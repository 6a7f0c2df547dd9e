"""Models by name, with versions, aliases, splits and shadows."""

COMMANDS = {
    "models": (
        "Models",
        "Describe and prove models, and keep them in a registry.",
        "rankmill.extensions.registry.commands.models:models",
    ),
}
"""The commands by name, each with its group in the help, the first line of its help, and its function; an
entry point of ``rankmill.commands`` points here.
"""
