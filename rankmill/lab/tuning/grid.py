"""Run the grids: plan all cells of all rounds, measure those without a record, and record the results."""

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

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.settings import Settings
from rankmill.lab.tuning.cell import CellResult, measure_cell
from rankmill.lab.tuning.experiment import Experiment, Measure, Value
from rankmill.lab.tuning.pairs import BUILT_IN, fingerprint, sample
from rankmill.lab.tuning.records import Records

RECORDS = "measurements.jsonl"


@dataclass(frozen=True)
class Plan:
    """A cell to be measured in a round; ``obstacle`` is the reason if its settings are invalid."""

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
        """Everything that the result depends on, except the pairs, as text."""
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
    """All cells to measure, in order: for each experiment, for each round, all cells of its grid.

    `flags` and `measure` are the command's options; `scale` multiplies the numbers of rows and requests.

    Raises
    ------
    ConfigError
        An option has an invalid value.
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


def run(plans: Iterable[Plan], records: Records) -> Iterator[tuple[Plan, CellResult, bool]]:
    """Measure the planned cells that `records` does not have; yields each result and whether it was recorded.

    Raises
    ------
    InputError
        The pairs cannot be read.
    """
    for planned in plans:
        pairs = _pairs(planned.measure)
        key = hashlib.sha256(f"{planned.key} {fingerprint(pairs)}".encode()).hexdigest()
        record = records.get(key)
        if record is not None:
            yield planned, CellResult(**record), True
            continue
        result = _measure(planned, pairs)
        records.add(key, result.model_dump())
        yield planned, result, False


def _measure(planned: Plan, pairs: pa.Table) -> CellResult:
    known: dict[str, Any] = {
        "experiment": planned.experiment.name,
        "cell": planned.cell,
        "round": planned.round,
    }
    if planned.settings is None:
        return CellResult(**known, status="impossible", reason=planned.obstacle, ended=time.time())
    return measure_cell(known, planned.settings, planned.measure, pairs)


def _pairs(measure: Measure) -> pa.Table:
    rows = max(measure.rows, measure.requests * measure.request_size, measure.warm_up)
    file = Path(measure.pairs)
    changed = 0 if measure.pairs in BUILT_IN or not file.exists() else file.stat().st_mtime_ns
    return _sample(measure.pairs, rows, (measure.query_column, measure.passage_column), changed)


@cache
def _sample(pairs: str, rows: int, columns: tuple[str, str], _changed: int) -> pa.Table:
    return sample(pairs, rows, columns)
