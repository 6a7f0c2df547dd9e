"""The experiment file: what to vary, what to measure, and what others have found."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jobs.errors import ConfigError
from jobs.runtime.settings import BASE, Settings, merge_settings, validate
from jobs.runtime.yaml_files import read_yaml
from rankmill.tuning.pairs import BUILT_IN

SHIPPED = BASE.with_name("experiments")

_NOT_VARIED = {"redis_url", "queue", "run_ttl"}
"""Settings of the server, of which every cell has its own."""

Value = str | int | float | bool


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measure(_Strict):
    """What is measured in each cell.

    Attributes
    ----------
    pairs
        A file of pairs, seen from the experiment's file, or ``varied`` or ``example``, which rankmill
        ships.
    query_column, passage_column
        Where the texts are in that file.
    rows
        Pairs of the bulk run; 0: none is made.
    requests
        Small requests, each one's latency measured; 0: none are made.
    request_size
        Pairs in each of them.
    concurrency
        Requests under way at a time.
    warm_up
        Pairs that every worker's warm-up takes, at least.
    repeats
        Measurements by the same workers.
    rounds
        Visits of each cell, each in fresh workers, after all other cells have had theirs.
    timeout
        Seconds for a visit, at most.
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
        """With some values replaced; raises `ConfigError` if that cannot be."""
        try:
            return Measure(**{**self.model_dump(), **changes})
        except ValidationError as error:
            raise ConfigError(_first(error)) from None

    def scaled(self, scale: float) -> Measure:
        """With that share of rows and requests, but at least one where there are some."""
        sizes = {name: getattr(self, name) for name in ("rows", "requests")}
        return self.model_copy(
            update={name: max(round(scale * size), 1) if size else 0 for name, size in sizes.items()}
        )


Figure = Literal[
    "pairs_per_second", "requests_per_second", "p50_ms", "p95_ms", "p99_ms", "padding_waste", "peak_mib"
]
"""What is known of a measured cell, as in the report's tables."""


class Finding(_Strict):
    """Something that was found elsewhere: ``figure`` of the cells ``of``, over that of ``over`` if given."""

    claim: str
    figure: Figure
    of: dict[str, Value]
    over: dict[str, Value] | None = None
    value: float


class Experiment(_Strict):
    """A grid of settings around a base, and what to measure in each of its cells."""

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
        known = [key for key in Settings.model_fields if key not in _NOT_VARIED]
        if info.field_name == "grid":
            known += ["rows", "requests", "request_size", "concurrency"]
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"unknown key {key!r}; keys are {', '.join(known)}")
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
        """The combinations of the grid's values, the last key's varying fastest."""
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
        """All settings of a cell, and what is measured there.

        The grid wins over the options given (`flags` for settings, `measure` for what is
        measured), and those over the file. `scale` is the share of rows and requests to take.

        Raises
        ------
        ConfigError
            The cell is impossible.
        """
        ours = {key: value for key, value in cell.items() if key in Measure.model_fields}
        theirs = {key: value for key, value in cell.items() if key not in ours}
        settings = validate(merge_settings({**self.settings, **flags, **theirs}, self.base))
        settings = settings.model_copy(update={"redis_url": None})  # every cell has its own server
        return settings, self.measure.changed({**measure, **ours}).scaled(scale)


def load_experiment(file: str | os.PathLike[str]) -> Experiment:
    """Read an experiment file, or the one of that name that rankmill ships.

    Raises
    ------
    ConfigError
        Names the file and the key: not there, not YAML, an unknown key, a bad value.
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
    merge_settings(config=experiment.base)  # a base that is not there is told before any work
    return experiment


def shipped() -> list[str]:
    """Names of the experiments that rankmill ships."""
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
    """The first thing that is wrong, with the key it is wrong with."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        known = Measure if parents[:1] == ["measure"] else Finding if parents else Experiment
        return f"unknown key {key!r}{' in ' + str(parents[0]) if parents else ''}; keys are " + ", ".join(
            known.model_fields
        )
    return f"{where}: {first['msg'].removeprefix('Value error, ')}" if where else first["msg"]
