"""Going over the grids, cell after cell and round after round, and keeping what is measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.errors import ConfigError
from jobs.runtime.settings import Settings
from rankmill.tuning.cell import Visit, visit
from rankmill.tuning.experiment import Experiment, Measure, Value
from rankmill.tuning.pairs import BUILT_IN, fingerprint, sample
from rankmill.tuning.records import Records

RECORDS = "measurements.jsonl"


@dataclass(frozen=True)
class Plan:
    """A visit to be made: ``obstacle`` says why it cannot be."""

    experiment: Experiment
    cell: dict[str, Value]
    round: int
    settings: Settings | None
    measure: Measure
    obstacle: str = ""

    @property
    def label(self) -> str:
        """The cell for a person."""
        return label(self.cell)

    @property
    def key(self) -> str:
        """What the measurements depend on, but for the pairs."""
        settings = self.settings.model_dump() if self.settings else self.obstacle
        measure = self.measure.model_dump(exclude={"rounds", "timeout"})
        version = importlib.metadata.version("rankmill")
        return json.dumps([version, self.experiment.name, self.cell, self.round, settings, measure])


def label(cell: Mapping[str, Value]) -> str:
    """The values of a cell for a person."""
    return ", ".join(f"{key}={str(value).lower()}" for key, value in cell.items())


def plan(
    experiments: Iterable[Experiment], flags: Mapping[str, Any], measure: Mapping[str, Any], scale: float
) -> list[Plan]:
    """All visits, in their order: each experiment's rounds, each over all of its cells.

    `flags` and `measure` are the options given; `scale` is the share of rows and requests to take.

    Raises
    ------
    ConfigError
        An option has a value it cannot take.
    """
    found = []
    for experiment in experiments:
        common = experiment.measure.changed(measure)
        for number in range(common.rounds):
            for cell in experiment.cells():
                try:
                    settings, measured = experiment.resolve(cell, flags, measure, scale)
                    found.append(Plan(experiment, cell, number, settings, measured))
                except ConfigError as error:
                    found.append(Plan(experiment, cell, number, None, common, str(error)))
    return found


def run(plans: Iterable[Plan], records: Records) -> Iterator[tuple[Plan, Visit, bool]]:
    """Make the visits that are not in `records` yet; yields each, and whether it was there already.

    Raises
    ------
    InputError
        The pairs cannot be read.
    """
    for planned in plans:
        pairs = _pairs(planned.measure)
        key = hashlib.sha256(f"{planned.key} {fingerprint(pairs)}".encode()).hexdigest()
        kept = records.get(key)
        if kept is not None:
            yield planned, Visit(**kept), True
            continue
        made = _make(planned, pairs)
        records.add(key, made.model_dump())
        yield planned, made, False


def _make(planned: Plan, pairs: pa.Table) -> Visit:
    known: dict[str, Any] = {
        "experiment": planned.experiment.name,
        "cell": planned.cell,
        "round": planned.round,
    }
    if planned.settings is None:
        return Visit(**known, status="impossible", reason=planned.obstacle, ended=time.time())
    return visit(known, planned.settings, planned.measure, pairs)


def _pairs(measure: Measure) -> pa.Table:
    rows = max(measure.rows, measure.requests * measure.request_size, measure.warm_up)
    file = Path(measure.pairs)
    changed = 0 if measure.pairs in BUILT_IN or not file.exists() else file.stat().st_mtime_ns
    return _sample(measure.pairs, rows, (measure.query_column, measure.passage_column), changed)


@cache
def _sample(pairs: str, rows: int, columns: tuple[str, str], _changed: int) -> pa.Table:
    return sample(pairs, rows, columns)
