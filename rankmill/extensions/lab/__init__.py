"""Finds the best settings for a machine, compares precisions, and makes models in 8 bits."""

COMMANDS = {
    "tune": (
        "Measure",
        "Find the best settings for this machine.",
        "rankmill.extensions.lab.commands.tune:tune",
    ),
    "experiment": (
        "Measure",
        "Measure grids of settings, and write a report.",
        "rankmill.extensions.lab.commands.experiment:experiment",
    ),
    "check-precision": (
        "Measure",
        "Compare the rankings of precisions with those of fp32.",
        "rankmill.extensions.lab.commands.check_precision:check_precision",
    ),
    "quantize": (
        "Models",
        "Make a model directory for 8 bits.",
        "rankmill.extensions.lab.commands.quantize:quantize",
    ),
}
"""Commands to add to `rankmill`: their help group, first line of help, and function. The entry point for
``rankmill.commands`` names this dictionary.
"""
