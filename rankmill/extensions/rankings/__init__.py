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
"""Commands that this extension adds to `rankmill`: the name of each, the section of ``--help`` that lists it,
the first line of its help, and its function.
"""
