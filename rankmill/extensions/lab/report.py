"""Writes the report of `rankmill experiment`: tables, plots and a comparison with reference results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankmill.extensions.lab.experiment import Experiment, Finding
from rankmill.extensions.lab.grid import CellResult, label
from rankmill.extensions.lab.machine import describe_machine, markdown_table
from rankmill.extensions.lab.statistics import BUSY_STAGES, measured_value, pareto, summary
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.producer.files.stores.writing import whole_file

_MAIN, _FRONT = "#c2410c", "#0f766e"
_STAGE_COLOURS = ("#94a3b8", "#0f766e", "#c2410c", "#1e293b")
_SEEN = 0.01
"""The share of padding is plotted only if it differs between the measured settings by more than this."""

mpl.rcParams.update({"svg.hashsalt": "rankmill", "svg.fonttype": "none", "font.size": 9})

REPORT = "report.md"

_PACKAGES = ("rankmill", "torch", "transformers", "openvino", "onnxruntime", "mlx", "numpy")

_COLUMNS = {
    "pairs_per_second": ("pairs/s", "{:,.0f}"),
    "requests_per_second": ("requests/s", "{:,.1f}"),
    "p50_ms": ("p50 ms", "{:,.0f}"),
    "p95_ms": ("p95 ms", "{:,.0f}"),
    "p99_ms": ("p99 ms", "{:,.0f}"),
    "padding_waste": ("padding", "{:.1%}"),
    "peak_mib": ("MiB", "{:,.0f}"),
    "startup_seconds": ("start, s", "{:,.1f}"),
}


def draw(experiment: Experiment, cells: pd.DataFrame, folder: Path) -> list[tuple[str, str]]:
    """Draw the plots of an experiment into `folder`; returns their captions and file names."""
    plots = {
        "cells": ("Speed, padding, stages and memory", _bars(cells)),
        "latency": ("Throughput against latency; green: the cells that no other cell beats in both",
                    _latency(cells)),
        "workers": ("Scaling with workers", _scaling(cells)),
    }  # fmt: skip
    drawn = []
    for name, (title, figure) in plots.items():
        if figure is not None:
            file = f"{experiment.name}-{name}.svg"
            save_chart(figure, folder / file)
            drawn.append((title, file))
    return drawn


def save_chart(figure: Figure, path: Path) -> None:
    """Write a figure to an SVG file; the same data gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})


def _bars(cells: pd.DataFrame) -> Figure:
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
    starts = pd.Series(0.0, cells.index)
    for stage, colour in zip(BUSY_STAGES, _STAGE_COLOURS, strict=True):
        share = 100 * cells[f"{stage}_share"]
        axes.barh(cells["label"], share, left=starts, color=colour, label=stage)
        starts += share
    axes.set_xlabel("stages, % of the workers' busy time")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7,
                columnspacing=0.8, handlelength=1)  # fmt: skip


def _memory(axes: Axes, cells: pd.DataFrame) -> None:
    axes.barh(cells["label"], cells["peak_mib"], color=_MAIN)
    axes.set_xlabel("peak memory of the workers, MiB")


def _latency(cells: pd.DataFrame) -> Figure | None:
    cells = cells[cells["p50_ms"].notna()]
    if len(cells) < 2:
        return None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, ("p50", "p95", "p99"), strict=True):
        latency, speed = cells[f"{name}_ms"], cells["requests_per_second"]
        front = pareto(speed.tolist(), latency.tolist())
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


def _scaling(cells: pd.DataFrame) -> Figure | None:
    cells = cells[cells["pairs_per_second"].notna()]
    if len(cells) < 2 or "workers" not in cells["cell"].iloc[0]:
        return None
    others = [", ".join(f"{k}={v}" for k, v in cell.items() if k != "workers") for cell in cells["cell"]]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for other, group in cells.groupby(others):
        workers = [cell["workers"] for cell in group["cell"]]
        by_count = dict(zip(workers, group["pairs_per_second"], strict=True))
        counts = sorted(count for count in by_count if isinstance(count, int))
        if len(counts) > 1:
            perfect = by_count[counts[0]] / counts[0]
            speeds, name = [by_count[count] for count in counts], str(other) or "measured"
            axes.plot(counts, speeds, marker="o", label=name)
            axes.plot(counts, [perfect * count for count in counts], linestyle=":", color="grey")
            axes.set_xticks(counts)
    axes.set(xlabel="workers (dotted: perfect scaling)", ylabel="pairs/s in bulk", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def write_report(folder: Path, experiments: Sequence[Experiment], results: Sequence[CellResult]) -> Path:
    """Write the report of experiments, and its plots, into `folder`; returns the path of the report."""
    parts = ["# Experiments", _machine(results)]
    for experiment in experiments:
        parts += _section(experiment, [v for v in results if v.experiment == experiment.name], folder)
    path = folder / REPORT
    with whole_file(path) as partial:
        partial.write_text(mask_passwords("\n\n".join(parts)) + "\n", encoding="utf-8")
    return path


def _machine(results: Sequence[CellResult]) -> str:
    models = dict.fromkeys(str(result.settings["model"]) for result in results if result.settings)
    ended = [result.ended for result in results]
    first, last = (time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end)) for end in (min(ended), max(ended)))
    facts = {
        **describe_machine(_PACKAGES),
        "model": ", ".join(models),
        "measured": f"{first} to {last}",
        "duration": f"{sum(result.seconds for result in results) / 60:,.1f} minutes",
    }
    return markdown_table(["machine", ""], facts.items()) + "\n\n" + (
        "Speeds are medians of the measurements of a cell, with their range; latencies are percentiles over "
        "all requests of a cell. On a shared machine, measurements made minutes apart may differ for this "
        "reason alone: a difference within the ranges is not significant."
    )  # fmt: skip


def _section(experiment: Experiment, results: list[CellResult], folder: Path) -> list[str]:
    cells = summary(experiment, results)
    parts = [f"## {experiment.name}", experiment.description.strip(), _how(results)]
    if len(cells):
        parts.append(_table(experiment, cells))
    if len(cells) and cells["row_errors"].any():
        parts.append(f"{cells['row_errors'].sum():,.0f} rows got an error instead of a score.")
    if experiment.reference:
        parts.append(_findings(experiment.reference, cells))
    if others := {label(v.cell): (v.status, v.reason) for v in results if v.status != "measured"}:
        rows = [(cell, status, reason) for cell, (status, reason) in others.items()]
        parts.append(markdown_table(["not measured", "", "because"], rows))
    if len(cells):
        parts += [f"![{caption}]({file})\n\n*{caption}*" for caption, file in draw(experiment, cells, folder)]
    return [part for part in parts if part]


def _how(results: Sequence[CellResult]) -> str:
    measure = next((result.measure for result in results if result.measure), None)
    if measure is None:
        return ""
    sizes = []
    if measure["rows"]:
        sizes.append(f"{measure['rows']:,} pairs in bulk")
    if measure["requests"]:
        sizes.append(f"{measure['requests']} requests of {measure['request_size']} pairs")
    return (
        f"Each cell: {' and '.join(sizes)} ({measure['pairs']}); repeats with the same workers: "
        f"{measure['repeats']}, rounds with fresh workers: {measure['rounds']}."
    )


def _table(experiment: Experiment, cells: pd.DataFrame) -> str:
    shown = [name for name in _COLUMNS if cells[name].notna().any()]
    speed = "pairs_per_second" if "pairs_per_second" in shown else "requests_per_second"
    header = ["cell", *experiment.grid, "ran as", *(_COLUMNS[name][0] for name in shown)]
    header.insert(header.index(_COLUMNS[speed][0]) + 1, "range")
    rows = []
    for number, (_, cell) in enumerate(cells.iterrows(), 1):
        row = [str(number), *(str(value).lower() for value in cell["cell"].values())]
        row.append(f"{cell['backend']}, {cell['device']}, {cell['precision']}")
        for name in shown:
            form = _COLUMNS[name][1]
            row.append(form.format(cell[name]) if np.isfinite(cell[name]) else "-")
            if name == speed:
                row.append(f"{form.format(cell['slowest'])} to {form.format(cell['fastest'])}")
        rows.append(row)
    return markdown_table(header, rows)


def _findings(findings: Sequence[Finding], cells: pd.DataFrame) -> str:
    values = [(each, measured_value(each, cells)) for each in findings]
    rows = [(each.claim, _value(each, each.value), _value(each, value)) for each, value in values]
    return markdown_table(["reference finding", "there", "here"], rows)


def _value(finding: Finding, value: float | None) -> str:
    if value is None:
        return "not measured"
    form = "{:.2f} times" if finding.over else "{:.0%}" if finding.figure == "padding_waste" else "{:,.0f}"
    return form.format(value)
