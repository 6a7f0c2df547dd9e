"""Describes the machine and draws a chart of the peers, for the benchmarks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from rankmill.extensions.lab.machine import describe_machine
from rankmill.extensions.lab.report import save_chart

OURS, PEERS = "#c2410c", "#94a3b8"


def machine() -> dict[str, str]:
    """The machine and the versions of the packages that matter, each with its label."""
    found = describe_machine()
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found


def bar_chart(
    path: Path, bars: Sequence[tuple[str, float, bool]], *, unit: str, marks: Mapping[str, float]
) -> None:
    """Horizontal bars (label, value, whether it is ours) as an SVG, with a dotted line at each of `marks`."""
    figure = Figure(figsize=(7.5, 0.8 + 0.34 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    labels, values, ours = zip(*bars, strict=True)
    drawn = axes.barh(labels, values, color=[OURS if mine else PEERS for mine in ours])
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a dotted line ends at a figure
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3, bbox=clear)
    for label, limit in marks.items():
        axes.axvline(limit, color="black", linestyle=":", linewidth=1, zorder=0)
        axes.text(  # above the bars, so that it does not hide a figure
            limit,
            1.01,
            f"{label}: {limit:,.0f}",
            ha="left",
            va="bottom",
            rotation=30,
            fontsize="small",
            transform=axes.get_xaxis_transform(),
        )
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    save_chart(figure, path)
