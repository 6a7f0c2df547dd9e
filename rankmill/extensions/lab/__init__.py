"""Finds the best settings for a machine, compares precisions, and makes models in 8 bits."""

_AT = "rankmill.extensions.lab.commands"

COMMANDS = {
    "tune": ("Measure", "Find the best settings for this machine.", f"{_AT}.tune:tune"),
    "experiment": (
        "Measure", "Measure grids of settings, and write a report.", f"{_AT}.experiment:experiment"
    ),
    "check-precision": (
        "Measure", "Compare the rankings of precisions with those of fp32.",
        f"{_AT}.check_precision:check_precision",
    ),
    "quantize": ("Models", "Make a model directory for 8 bits.", f"{_AT}.quantize:quantize"),
}  # fmt: skip
"""Commands to add to `rankmill`: their help group, first line of help, and function. The entry point for
``rankmill.commands`` names this dictionary.
"""
