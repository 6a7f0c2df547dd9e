"""Rankings: hard negatives, and the measures of information retrieval."""

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
"""For the seam ``rankmill.commands``: purpose, first line of the help, and where the command is."""
