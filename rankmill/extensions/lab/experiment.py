"""Reads experiment files: a grid of settings, how to measure it, and reference results."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rankmill.extensions.lab.pairs import BUILT_IN
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.settings import BASE, Settings, merge_settings, validate
from rankmill.jobs.runtime.yaml_files import read_yaml

SHIPPED = BASE.with_name("experiments")

_NOT_VARIED = {"redis_url", "queue", "run_ttl"}
"""Settings that an experiment cannot vary. Each combination of settings is measured with a new Redis server
that serves nothing else, so a choice of server, queue or expiry would make no difference.
"""

Value = str | int | float | bool


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measure(_Strict):
    """How to measure a cell (one combination of settings) of an experiment's grid.

    Attributes
    ----------
    pairs
        A file of pairs, relative to the experiment's file, or ``varied`` or ``example`` (shipped pairs).
    query_column, passage_column
        Columns of `pairs` with the texts.
    rows
        Number of pairs in the bulk run; 0 means no bulk run.
    requests
        Number of small requests whose latency is measured; 0 means none.
    request_size
        Pairs in a request.
    concurrency
        Number of requests in flight at a time.
    warm_up
        Number of pairs that are scored as a warm-up; every worker scores some of them.
    repeats
        Number of measurements with the same workers.
    rounds
        Number of passes over the whole grid; each pass measures each cell with fresh workers.
    timeout
        Seconds after which the measurement of a cell in a round fails.
    """

    pairs: str = "varied"
    query_column: str = "query"
    passage_column: str = "passage"
    rows: int = Field(default=1000, ge=0)
    requests: int = Field(default=0, ge=0)
    request_size: int = Field(default=20, ge=1)
    concurrency: int = Field(default=1, ge=1)
    warm_up: int = Field(default=64, ge=1)
    repeats: int = Field(default=3, ge=1)
    rounds: int = Field(default=1, ge=1)
    timeout: float = Field(default=600, gt=0)

    @model_validator(mode="after")
    def _something(self) -> Measure:
        if not self.rows and not self.requests:
            raise ValueError("rows and requests are both 0: nothing would be measured")
        return self

    def changed(self, changes: Mapping[str, Any]) -> Measure:
        """Return a copy with some values replaced by `changes`. If `changes` name shipped pairs, the columns
        of the former file are dropped. Raises `ConfigError` for an invalid value.
        """
        dropped = {"query_column", "passage_column"} if changes.get("pairs") in BUILT_IN else set()
        try:
            return Measure(**{**self.model_dump(exclude=dropped), **changes})
        except ValidationError as error:
            raise ConfigError(_first(error)) from None

    def scaled(self, scale: float) -> Measure:
        """Return a copy with `scale` times as many rows and requests. A number above 0 stays at least 1."""
        sizes = {"rows": self.rows, "requests": self.requests}
        scaled = {name: max(round(scale * size), 1) for name, size in sizes.items() if size}
        return self.model_copy(update=scaled)


Statistic = Literal[
    "pairs_per_second", "requests_per_second", "p50_ms", "p95_ms", "p99_ms", "padding_waste", "peak_mib"
]
"""Names of the statistics that a report shows for each measured combination of settings."""


class Finding(_Strict):
    """A reference result, to compare this machine's measurements with.

    Attributes
    ----------
    claim
        The result in words.
    figure
        Name of the statistic, such as ``p95_ms``.
    of
        Settings that select cells of the grid. The result is the median of `figure` over these cells.
    over
        Settings that select other cells. If given, the result is the median over the cells of `of`, divided
        by the median over these cells.
    value
        The reference value: a median, or a ratio of medians.
    """

    claim: str
    figure: Statistic
    of: dict[str, Value]
    over: dict[str, Value] | None = None
    value: float


class Experiment(_Strict):
    """The content of an experiment file: a base config, a grid of settings that change this config, and how
    to measure each cell of the grid.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    description: str
    base: str = "base"
    settings: dict[str, Any] = {}
    grid: dict[str, list[Value]] = Field(min_length=1)
    measure: Measure = Measure()
    reference: tuple[Finding, ...] = ()

    @field_validator("settings", "grid")
    @classmethod
    def _known(cls, values: dict[str, Any], info: Any) -> dict[str, Any]:
        allowed = [key for key in Settings.model_fields if key not in _NOT_VARIED]
        if info.field_name == "grid":
            allowed += ["rows", "requests", "request_size", "concurrency"]
        for key, value in values.items():
            if key not in allowed:
                raise ValueError(f"unknown key {key!r}; keys are {', '.join(allowed)}")
            if info.field_name == "grid" and not value:
                raise ValueError(f"{key} has no values")
        return values

    @model_validator(mode="after")
    def _of_the_grid(self) -> Experiment:
        for finding in self.reference:
            for key in {**finding.of, **(finding.over or {})}:
                if key not in self.grid:
                    raise ValueError(f"reference {finding.claim!r}: {key!r} is not in the grid")
        return self

    def cells(self) -> list[dict[str, Value]]:
        """Return the cells of the grid: all combinations of its values. The value of the last key changes
        fastest.
        """
        return [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]

    def resolve(
        self,
        cell: Mapping[str, Value],
        flags: Mapping[str, Any],
        measure: Mapping[str, Any],
        scale: float = 1.0,
    ) -> tuple[Settings, Measure]:
        """Return all settings of a cell of the grid, and how to measure the cell.

        Parameters
        ----------
        cell
            The values of the cell, which override the command's options.
        flags
            The command's options for settings, which override the experiment file.
        measure
            The command's options for measuring, which override the experiment file.
        scale
            Factor for the numbers of rows and requests.

        Raises
        ------
        ConfigError
            The cell's settings are invalid.
        """
        ours = {key: value for key, value in cell.items() if key in Measure.model_fields}
        theirs = {key: value for key, value in cell.items() if key not in ours}
        settings = validate(merge_settings({**self.settings, **flags, **theirs}, self.base))
        settings = settings.model_copy(update={"redis_url": None})  # because every cell has its own server
        return settings, self.measure.changed({**measure, **ours}).scaled(scale)


def load_experiment(file: str | os.PathLike[str]) -> Experiment:
    """Read an experiment file, or a shipped experiment by its name.

    Raises
    ------
    ConfigError
        The file or its base config does not exist or is not YAML, or a key is unknown or has an invalid
        value.
    """
    path = _locate(Path(file))
    try:
        experiment = Experiment.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error)}") from None
    measure = experiment.measure
    if experiment.base.endswith((".yaml", ".yml")):
        experiment = experiment.model_copy(update={"base": str(path.parent / experiment.base)})
    if measure.pairs not in BUILT_IN:
        beside = measure.model_copy(update={"pairs": str(path.parent / measure.pairs)})
        experiment = experiment.model_copy(update={"measure": beside})
    merge_settings(config=experiment.base)  # a missing base is reported before any work
    return experiment


def shipped() -> list[str]:
    """Names of the experiments that come with rankmill."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def _locate(path: Path) -> Path:
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    if str(path) not in shipped():
        raise ConfigError(
            f"no experiment {path}, and rankmill ships none of that name; it ships {', '.join(shipped())}"
        )
    return SHIPPED / f"{path}.yaml"


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        model = Measure if parents[:1] == ["measure"] else Finding if parents else Experiment
        return f"unknown key {key!r}{' in ' + str(parents[0]) if parents else ''}; keys are " + ", ".join(
            model.model_fields
        )
    return f"{where}: {first['msg'].removeprefix('Value error, ')}" if where else first["msg"]
