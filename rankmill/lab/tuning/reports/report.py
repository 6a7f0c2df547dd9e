"""The report: a section for each experiment with its tables, reference findings and plots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.lab.tuning.cell import CellResult
from rankmill.lab.tuning.experiment import Experiment, Finding
from rankmill.lab.tuning.grid import label
from rankmill.lab.tuning.machine import describe_machine, markdown_table
from rankmill.lab.tuning.reports.plots import draw
from rankmill.lab.tuning.reports.statistics import measured_value, summary

REPORT = "report.md"

_PACKAGES = ("rankmill", "torch", "transformers", "openvino", "onnxruntime", "mlx", "numpy")
_PERCENT = {"padding_waste"}
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


def write_report(folder: Path, experiments: Sequence[Experiment], results: Sequence[CellResult]) -> Path:
    """Write the report and its plots into `folder`; returns the path of the report."""
    parts = ["# Experiments", _machine(results)]
    for experiment in experiments:
        parts += _section(experiment, [v for v in results if v.experiment == experiment.name], folder)
    path = folder / REPORT
    path.write_text(mask_passwords("\n\n".join(parts)) + "\n", encoding="utf-8")
    return path


def _machine(results: Sequence[CellResult]) -> str:
    facts = {**describe_machine(_PACKAGES), "model": ", ".join(_seen(results, "model"))}
    ended = [result.ended for result in results]
    if ended:
        facts["measured"] = f"{_day(min(ended))} to {_day(max(ended))}"
        facts["duration"] = f"{sum(result.seconds for result in results) / 60:,.1f} minutes"
    return markdown_table(["machine", ""], facts.items()) + "\n\n" + (
        "Speeds are medians of the measurements of a cell, with their range; latencies are percentiles over "
        "all requests of a cell. On a shared machine, measurements made minutes apart may differ for this "
        "reason alone: a difference within the ranges is not significant."
    )  # fmt: skip


def _section(experiment: Experiment, results: list[CellResult], folder: Path) -> list[str]:
    cells = summary(experiment, results)
    parts = [f"## {experiment.name}", experiment.description.strip(), _how(results)]
    if len(cells):
        parts += [_table(experiment, cells), _best(cells)]
    if len(cells) and cells["row_errors"].any():
        parts.append(f"{cells['row_errors'].sum():,.0f} rows got an error instead of a score.")
    if experiment.reference:
        parts.append(_findings(experiment.reference, cells))
    if others := {label(v.cell): (v.status, v.reason) for v in results if v.status != "measured"}:
        rows = [(cell, status, _cell(reason)) for cell, (status, reason) in others.items()]
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


def _best(cells: pd.DataFrame) -> str:
    """The best cell by each statistic, compared with the worst."""
    lines = []
    for name, what, most in (
        ("pairs_per_second", "bulk throughput", True),
        ("requests_per_second", "throughput of requests", True),
        ("p95_ms", "p95 latency", False),
        ("peak_mib", "memory", False),
    ):
        known = cells[cells[name].notna()]
        if len(known) < 2:
            continue
        values = known[name].to_numpy()
        ends = (int(values.argmax()), int(values.argmin()))
        best, worst = ends if most else ends[::-1]
        ratio, labels = values[best] / values[worst], known["label"]
        lines.append(f"- best {what}: {labels.iloc[best]}, {ratio:.2f} times that of {labels.iloc[worst]}")
    return "\n".join(lines)


def _findings(findings: Sequence[Finding], cells: pd.DataFrame) -> str:
    rows = []
    for finding in findings:
        value = measured_value(finding, cells)
        rows.append([finding.claim, _value(finding, finding.value), _value(finding, value)])
    return markdown_table(["reference finding", "there", "here"], rows)


def _value(finding: Finding, value: float | None) -> str:
    if value is None:
        return "not measured"
    return (
        f"{value:.2f} times"
        if finding.over
        else f"{value:.0%}"
        if finding.figure in _PERCENT
        else f"{value:,.0f}"
    )


def _seen(results: Sequence[CellResult], setting: str) -> list[str]:
    return list(dict.fromkeys(str(result.settings[setting]) for result in results if result.settings))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
