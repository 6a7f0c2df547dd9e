"""Chooses hard negatives from rankings, and measures rankings."""

COMMANDS = {
    "evaluate": (
        "Measure",
        "Measure a ranking before and after reranking.",
        "rankmill.extensions.rankings.commands.evaluate:evaluate",
    ),
    "mine": (
        "Score",
        "Choose hard negatives from a scored run.",
        "rankmill.extensions.rankings.commands.mine:mine_negatives",
    ),
}
"""The `rankmill` commands that this extension adds, by name. Each has its group in the help, the first line
of its help, and its function. An entry point of ``rankmill.commands`` points to this dictionary.
"""
