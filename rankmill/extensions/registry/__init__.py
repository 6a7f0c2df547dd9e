"""A registry of models: keeps versions of each model, and aliases such as ``production`` for them."""

COMMANDS = {
    "models": (
        "Models",
        "Describe and prove models, and keep them in a registry.",
        "rankmill.extensions.registry.commands.models:models",
    )
}
"""Commands that this extension adds to `rankmill`: the name of each, the section of ``--help`` that lists it,
the first line of its help, and its function.
"""
