"""The report's plots: bars, latency and scaling; a plot without enough data is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankmill.lab.tuning.experiment import Experiment
from rankmill.lab.tuning.reports.statistics import BUSY_STAGES, pareto

_MAIN, _FRONT = "#c2410c", "#0f766e"
_STAGE_COLOURS = ("#94a3b8", "#0f766e", "#c2410c", "#1e293b")
_SEEN = 0.01
"""Smallest difference of padding between cells with which padding is plotted."""

mpl.rcParams.update({"svg.hashsalt": "rankmill", "svg.fonttype": "none", "font.size": 9})


def draw(experiment: Experiment, cells: pd.DataFrame, folder: Path) -> list[tuple[str, str]]:
    """Draw the plots of an experiment into `folder`; returns their captions and file names."""
    drawn = []
    for title, name, plot in (
        ("Speed, padding, stages and memory", "cells", _bars),
        ("Throughput against latency; green: the cells that no other cell beats in both", "latency",
         _latency),
        ("Scaling with workers", "workers", _scaling),
    ):  # fmt: skip
        figure = plot(experiment, cells)
        if figure is not None:
            file = f"{experiment.name}-{name}.svg"
            save_chart(figure, folder / file)
            drawn.append((title, file))
    return drawn


def save_chart(figure: Figure, path: Path) -> None:
    """Write an SVG; the same data gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(experiment: Experiment, cells: pd.DataFrame) -> Figure | None:
    """Panels of horizontal bars, one bar for each cell."""
    panels: list[Callable[[Axes, pd.DataFrame], None]] = []
    if cells["pairs_per_second"].notna().any():
        panels.append(_speed)
    if cells["padding_waste"].max() - cells["padding_waste"].min() > _SEEN:
        panels.append(_waste)
    panels += [_stages, _memory]
    figure = Figure(figsize=(3.2 * len(panels) + 1.5, 1.2 + 0.32 * len(cells)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for place, panel in zip(axes, panels, strict=True):
        panel(place, cells)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    return figure


def _speed(axes: Axes, cells: pd.DataFrame) -> None:
    speed = cells["pairs_per_second"]
    spread: Any = [speed - cells["slowest"], cells["fastest"] - speed]
    axes.barh(cells["label"], speed, color=_MAIN, xerr=spread, error_kw={"capsize": 2, "linewidth": 1})
    axes.set_xlabel("pairs/s in bulk (line: range)")


def _waste(axes: Axes, cells: pd.DataFrame) -> None:
    axes.barh(cells["label"], 100 * cells["padding_waste"], color=_MAIN)
    axes.set_xlabel("padding, % of computed tokens")


def _stages(axes: Axes, cells: pd.DataFrame) -> None:
    left = pd.Series(0.0, cells.index)
    for stage, colour in zip(BUSY_STAGES, _STAGE_COLOURS, strict=True):
        share = 100 * cells[f"{stage}_share"]
        axes.barh(cells["label"], share, left=left, color=colour, label=stage)
        left += share
    axes.set_xlabel("stages, % of the workers' busy time")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7,
                columnspacing=0.8, handlelength=1)  # fmt: skip


def _memory(axes: Axes, cells: pd.DataFrame) -> None:
    axes.barh(cells["label"], cells["peak_mib"], color=_MAIN)
    axes.set_xlabel("peak memory of the workers, MiB")


def _latency(experiment: Experiment, cells: pd.DataFrame) -> Figure | None:
    """Requests a second against each percentile."""
    cells = cells[cells["p50_ms"].notna()]
    if len(cells) < 2:
        return None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, ("p50", "p95", "p99"), strict=True):
        latency, speed = cells[f"{name}_ms"], cells["requests_per_second"]
        front = pareto(speed, latency)
        axes.plot(latency.iloc[front], speed.iloc[front], color=_FRONT, linewidth=1, zorder=1)
        colours = [_FRONT if place in front else _MAIN for place in range(len(cells))]
        axes.scatter(latency, speed, color=colours, zorder=2, s=18)
        for place in range(len(cells)):
            at = latency.iloc[place], speed.iloc[place]
            axes.annotate(str(place + 1), at, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set(xlabel=f"{name} of a request, ms", xlim=(0, 1.15 * latency.max()))
        axes.set(ylim=(0, 1.1 * speed.max()))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("requests/s")
    names = "\n".join(f"{number}  {label}" for number, label in enumerate(cells["label"], 1))
    panels[-1].text(1.05, 1.0, names, transform=panels[-1].transAxes, va="top", fontsize=8)
    return figure


def _scaling(experiment: Experiment, cells: pd.DataFrame) -> Figure | None:
    """Speed against the number of workers, beside a line of perfect scaling."""
    cells = cells[cells["pairs_per_second"].notna()]
    if "workers" not in experiment.grid or len(cells) < 2:
        return None
    others = [", ".join(f"{k}={v}" for k, v in cell.items() if k != "workers") for cell in cells["cell"]]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for other, group in cells.groupby(others):
        _line(axes, str(other) or "measured", group)
    axes.set(xlabel="workers (dotted: perfect scaling)", ylabel="pairs/s in bulk", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _line(axes: Axes, name: str, cells: pd.DataFrame) -> None:
    speeds = {
        cell["workers"]: speed for cell, speed in zip(cells["cell"], cells["pairs_per_second"], strict=True)
    }
    counts = sorted(count for count in speeds if isinstance(count, int))
    if len(counts) < 2:
        return
    axes.plot(counts, [speeds[count] for count in counts], marker="o", label=name)
    axes.plot(
        counts, [speeds[counts[0]] * count / counts[0] for count in counts], linestyle=":", color="grey"
    )
    axes.set_xticks(counts)
