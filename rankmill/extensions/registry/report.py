"""Writes the report of `rankmill models compare`: a page in Markdown, and a plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from rankmill.extensions.lab.machine import markdown_table
from rankmill.extensions.lab.report import save_chart
from rankmill.extensions.registry.compare import ModelComparison
from rankmill.producer.files.stores.writing import whole_file

_COLOURS = ("#0f766e", "#c2410c")
_LONGEST = 120


def write_report(comparison: ModelComparison, folder: Path) -> Path:
    """Write ``report.md`` and ``scores.svg`` into a folder; returns the report's path. Raises `OSError` if
    the files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_chart(_figure(comparison), folder / "scores.svg")
    one, two = comparison.sides
    ranks = two.measured.agreement
    figures = [name.replace("Spearman", "Spearman within queries (95% interval)") for name in one.figures]
    differences = [
        [_cell(each.query), f"{each.spearman:.3f}", _cell(each.first), _cell(each.second)]
        for each in comparison.differences
    ]
    models = [[side.model, *side.figures.values()] for side in comparison.sides]
    parts = [
        f"# {two.model} beside {one.model}",
        f"{ranks.rows:,} rows of {ranks.queries:,} queries.",
        markdown_table(["model", *figures], models),
        "The speeds are those of one run after the other, with whatever else the workers did.",
        "![Scores of both, and the rank correlation of each query](scores.svg)",
        "## Queries that differ most",
        markdown_table(["query", "Spearman", f"best of {one.model}", f"best of {two.model}"], differences),
    ]
    path = folder / "report.md"
    with whole_file(path) as partial:
        partial.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _figure(comparison: ModelComparison) -> Figure:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    spread, both, queries = figure.subplots(1, 3)
    finite = [side.scores[np.isfinite(side.scores)] for side in comparison.sides]
    bins = np.histogram_bin_edges(np.concatenate(finite), 40).tolist()
    for side, scores, colour in zip(comparison.sides, finite, _COLOURS, strict=True):
        spread.hist(scores, bins=bins, histtype="step", color=colour, label=side.model)
    spread.set_xlabel("score")
    spread.set_ylabel("rows")
    spread.legend()
    one, two = comparison.sides
    both.scatter(one.scores, two.scores, s=4, color=_COLOURS[0], alpha=0.4, linewidths=0)
    both.set_xlabel(f"score of {one.model}")
    both.set_ylabel(f"score of {two.model}")
    queries.hist(comparison.spearman, bins=np.linspace(-1, 1, 41).tolist(), color=_COLOURS[1])
    queries.set_xlabel("rank correlation within a query")
    queries.set_ylabel("queries")
    return figure


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
