"""Makes a table of all measurements of experiments, and a summary of each combination of settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from rankmill.extensions.lab.experiment import Experiment, Finding, Value
from rankmill.extensions.lab.grid import CellResult, Repeat, label

BUSY_STAGES = ("fetch", "tokenize", "forward", "write")
"""Stages in which a worker is busy. The stage ``wait`` is left out, because it depends on the requests."""


def measurements(results: Iterable[CellResult]) -> pd.DataFrame:
    """Make a table with a row for each measurement of an experiment. A row has all settings and statistics of
    the measurement. A combination of settings without measurements has one row, without statistics.
    """
    rows = []
    for result in results:
        of_cell = {
            **result.model_dump(exclude={"repeats", "cell", "settings", "measure", "stage_seconds"}),
            "cell": label(result.cell),
            **{f"setting_{key}": _text(value) for key, value in result.settings.items()},
            **{f"measure_{key}": value for key, value in result.measure.items()},
            **{f"{stage}_seconds": result.stage_seconds.get(stage, np.nan) for stage in BUSY_STAGES},
        }
        for number, repeat in enumerate(result.repeats or [None]):
            figures = _statistics(repeat) if repeat else {}
            raw = {"latencies": repeat.latencies, "row_errors": repeat.row_errors} if repeat else {}
            rows.append({**of_cell, "repeat": number, **figures, **raw})
    return pd.DataFrame(rows)


def summary(experiment: Experiment, results: Iterable[CellResult]) -> pd.DataFrame:
    """Make a table with a row for each measured cell of an experiment's grid, in the grid's order. A row has
    the medians of the statistics, the range of the speed, and the highest peak memory.

    The percentiles of a cell are computed from the latencies of all the cell's measurements together.
    """
    rows = []
    mine = list(results)
    for cell in experiment.cells():
        measured = [result for result in mine if result.cell == cell and result.status == "measured"]
        if measured:
            rows.append({"cell": cell, "label": label(cell), **_of_cell(measured)})
    return pd.DataFrame(rows)


def measured_value(finding: Finding, cells: pd.DataFrame) -> float | None:
    """Return the value that this machine measured for a reference result: a median, or a ratio of two
    medians. Return ``None`` if the cells of the result were not measured.
    """
    of = _matching(cells, finding.of)[finding.figure].median() if len(cells) else np.nan
    if finding.over is not None:
        of /= _matching(cells, finding.over)[finding.figure].median() if len(cells) else np.nan
    return float(of) if np.isfinite(of) else None


def pareto(speeds: Sequence[float], latencies: Sequence[float]) -> list[int]:
    """Indices of the points on the Pareto front of speed and latency, ordered by latency.

    >>> pareto([10, 20, 15, 30], [1, 2, 3, 9])
    [0, 1, 3]
    """
    front: list[int] = []
    for place in sorted(range(len(speeds)), key=lambda place: (latencies[place], -speeds[place])):
        if not front or speeds[place] > speeds[front[-1]]:
            front.append(place)
    return front


def _of_cell(results: list[CellResult]) -> dict[str, Any]:
    repeats = [repeat for result in results for repeat in result.repeats]
    figures = pd.DataFrame([_statistics(repeat) for repeat in repeats])
    medians = figures.median()
    speed = "pairs_per_second" if medians["pairs_per_second"] > 0 else "requests_per_second"
    latencies = [latency for repeat in repeats for latency in repeat.latencies]
    stages = pd.DataFrame([result.stage_seconds for result in results])[list(BUSY_STAGES)].sum()
    return {
        **{str(name): value for name, value in medians.items()},
        **_percentiles(latencies),
        "slowest": figures[speed].min(),
        "fastest": figures[speed].max(),
        "peak_mib": max(result.peak_bytes for result in results) / 2**20,
        "startup_seconds": float(np.median([result.startup_seconds for result in results])),
        "row_errors": sum(repeat.row_errors for repeat in repeats),
        **{f"{stage}_share": seconds / max(stages.sum(), 1e-9) for stage, seconds in stages.items()},
        **{name: getattr(results[0], name) for name in ("device", "backend", "precision")},
    }


def _statistics(repeat: Repeat) -> dict[str, float]:
    requests, seconds = len(repeat.latencies), repeat.request_seconds
    return {
        "pairs_per_second": repeat.rows / repeat.bulk_seconds if repeat.bulk_seconds else np.nan,
        "requests_per_second": requests / seconds if seconds else np.nan,
        **_percentiles(repeat.latencies),
        "padding_waste": repeat.padding_waste,
    }


def _percentiles(latencies: Sequence[float]) -> dict[str, float]:
    """The 50th, 95th and 99th percentiles, in ms, of latencies in seconds."""
    milliseconds = 1000 * np.percentile(latencies or [np.nan], [50, 95, 99])
    return dict(zip(("p50_ms", "p95_ms", "p99_ms"), milliseconds.tolist(), strict=True))


def _matching(cells: pd.DataFrame, wanted: Mapping[str, Value]) -> pd.DataFrame:
    return cells[[wanted.items() <= cell.items() for cell in cells["cell"]]]


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value) if not isinstance(value, str) else value
