"""Measures the cells (combinations of settings) of experiments in rounds, and records the results."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from rankmill.extensions.lab.bench import Bench, BenchFailed, Records, split_requests
from rankmill.extensions.lab.experiment import Experiment, Measure, Value
from rankmill.extensions.lab.pairs import fingerprint
from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import ConfigError, EmbeddedError, RunFailed
from rankmill.jobs.contract.results import ChunkStats
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.files.manifest import content_here

RECORDS = "measurements.jsonl"


class Repeat(BaseModel):
    """One measurement of a combination of settings: a bulk run of ``rows`` pairs, then small requests that
    took ``latencies`` seconds.

    ``padding_waste`` is the share of the computed tokens that was padding, in the bulk run or, if there was
    none, in the requests.
    """

    rows: int = 0
    bulk_seconds: float = 0.0
    latencies: list[float] = []
    request_seconds: float = 0.0
    padding_waste: float = 0.0
    row_errors: int = 0


class CellResult(BaseModel):
    """The result of one round of measurements of a cell (one combination of settings).

    The ``status`` is ``impossible`` if the settings are not valid, or if workers cannot start or score with
    them. It is ``failed`` if workers died or took too long.
    """

    experiment: str
    cell: dict[str, Value]
    round: int
    status: Literal["measured", "impossible", "failed"]
    reason: str = ""
    settings: dict[str, Any] = {}
    measure: dict[str, Any] = {}
    device: str = ""
    backend: str = ""
    precision: str = ""
    startup_seconds: float = 0.0
    peak_bytes: int = 0
    stage_seconds: dict[str, float] = {}
    repeats: list[Repeat] = []
    seconds: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A cell (one combination of settings) to measure in one round. If the settings are not valid,
    ``obstacle`` says why.
    """

    experiment: Experiment
    cell: dict[str, Value]
    round: int
    settings: Settings | None
    measure: Measure
    obstacle: str = ""

    @property
    def key(self) -> str:
        """A text that identifies this measurement by its settings, model, round, experiment and release, but
        not by its pairs.
        """
        settings = self.settings.model_dump() if self.settings else self.obstacle
        content = self.settings and content_here(self.settings.model, cache_folder(self.settings.cache_dir))
        measure = self.measure.model_dump(exclude={"rounds", "timeout"})
        version = importlib.metadata.version("rankmill")
        return json.dumps([version, self.experiment.name, self.cell, self.round, settings, content, measure])


def label(cell: Mapping[str, Value]) -> str:
    """Return the settings of a cell as text for a person, such as ``backend=torch, precision=fp32``."""
    return ", ".join(f"{key}={str(value).lower()}" for key, value in cell.items())


def plan(
    experiments: Iterable[Experiment], flags: Mapping[str, Any], measure: Mapping[str, Any], scale: float
) -> list[Plan]:
    """Return all cells to measure, ordered by experiment, then by round, then as in the grid.

    Parameters
    ----------
    experiments
        The experiments, each with a grid of settings.
    flags
        The command's options for settings.
    measure
        The command's options for measuring.
    scale
        Factor for the numbers of rows and requests.

    Raises
    ------
    ConfigError
        An option has an invalid value.
    """
    plans = []
    for experiment in experiments:
        common = experiment.measure.changed(measure)
        for number in range(common.rounds):
            for cell in experiment.cells():
                try:
                    settings, measured = experiment.resolve(cell, flags, measure, scale)
                    plans.append(Plan(experiment, cell, number, settings, measured))
                except ConfigError as error:
                    plans.append(Plan(experiment, cell, number, None, common, str(error)))
    return plans


def run(
    planned: Plan, records: Records, draw: Callable[[str, int, tuple[str, str]], pa.Table]
) -> tuple[CellResult, bool]:
    """Measure a cell, unless `records` has its result. Returns the result, and whether it was recorded
    before. `draw` is `sample`, or a function that remembers what `sample` has returned.

    Raises
    ------
    InputError
        The pairs or a model's files cannot be read.
    """
    measure = planned.measure
    rows = max(measure.rows, measure.requests * measure.request_size, measure.warm_up)
    pairs = draw(measure.pairs, rows, (measure.query_column, measure.passage_column))
    key = hashlib.sha256(f"{fingerprint(pairs)} {planned.key}".encode()).hexdigest()
    if record := records.get(key):
        return CellResult(**record), True
    result = _measured(planned, pairs)
    records.add(key, result.model_dump())
    return result, False


def _measured(planned: Plan, pairs: pa.Table) -> CellResult:
    started = system.monotonic()
    name = planned.experiment.name
    record: dict[str, Any] = {"experiment": name, "cell": planned.cell, "round": planned.round}
    if planned.settings is None:
        return CellResult(**record, status="impossible", reason=planned.obstacle, ended=system.now())
    record |= {"settings": planned.settings.model_dump(), "measure": planned.measure.model_dump()}
    try:
        with Bench(planned.settings, planned.measure.timeout) as bench:
            record |= _measurements(bench, planned.measure, pairs) | {"status": "measured"}
    except (RunFailed, EmbeddedError) as error:
        record |= {"status": "impossible", "reason": str(error)}
    except BenchFailed as error:
        record |= {"status": "failed", "reason": str(error)}
    return CellResult(**record, seconds=system.monotonic() - started, ended=system.now())


def _measurements(bench: Bench, measure: Measure, pairs: pa.Table) -> dict[str, Any]:
    startup = bench.warm_up(pairs.slice(0, measure.warm_up))
    requests = split_requests(pairs, measure.requests, measure.request_size)
    repeats = []
    stats: list[ChunkStats] = []
    for _ in range(measure.repeats):
        bulk = [bench.bulk(pairs.slice(0, measure.rows))] if measure.rows else []
        began = time.perf_counter()
        answers = bench.requests(requests, measure.concurrency)
        seconds = time.perf_counter() - began
        stats = [chunk for scored in bulk or answers for chunk in scored.stats]
        padded = sum(chunk.padded_tokens for chunk in stats)
        repeat = Repeat(
            rows=measure.rows,
            bulk_seconds=sum(scored.seconds for scored in bulk),
            latencies=[answer.seconds for answer in answers],
            request_seconds=seconds if requests else 0.0,
            padding_waste=1 - sum(chunk.tokens for chunk in stats) / padded if padded else 0.0,
            row_errors=sum(int(np.isnan(scored.scores).sum()) for scored in [*bulk, *answers]),
        )
        repeats.append(repeat)
    ran_on = {name: getattr(stats[0], name) for name in ("device", "backend", "precision")} if stats else {}
    return {
        "startup_seconds": startup,
        "repeats": repeats,
        "stage_seconds": bench.stage_seconds(),
        "peak_bytes": bench.peak_bytes,
        **ran_on,
    }
