"""Chooses hard negatives from rankings, and measures rankings."""

_AT = "rankmill.extensions.rankings.commands"

COMMANDS = {
    "evaluate": ("Measure", "Measure a ranking before and after reranking.", f"{_AT}.evaluate:evaluate"),
    "mine": ("Score", "Choose hard negatives from a scored run.", f"{_AT}.mine:mine_negatives"),
}
"""Commands that this extension adds to `rankmill`: the name of each, the section of ``--help`` that lists it,
the first line of its help, and its function.
"""
