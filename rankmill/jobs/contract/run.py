"""A run, which is one submission, and its progress, as Redis keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.priority import (
    NOBODY,
    Priority,
    Tenant,
    choose_priority,
    new_run_id,
    priority_of,
)
from rankmill.jobs.contract.schema import FORMAT, Count, Inputs, Seconds, Weight, WireModel, none_if_empty
from rankmill.jobs.contract.spec import OPEN_PRECISIONS, ScoreSpec
from rankmill.jobs.system import system

_QUIET_SECONDS = 30

MAX_ROW_ERRORS = 200
"""Redis keeps only a run's first row errors, at most this many. The file ``*.errors.jsonl`` beside the output
has all row errors.
"""

MAX_ERROR_CHARS = 500


def _parse_spec(value: object) -> object:
    if not isinstance(value, str):
        return value
    fields = from_json(value)
    if isinstance(fields, dict) and (missing := sorted(ScoreSpec.model_fields.keys() - fields.keys())):
        raise ValueError(f"it has no {', '.join(missing)}")
    return fields


class Run(WireModel):
    """The data of a run that Redis keeps for workers and other commands.

    ``rows`` is the number of input rows; ``None`` if the producer did not know this number at the start.
    ``created`` is in seconds since 1970. ``ttl`` is the expiry in seconds from the latest change to the run.
    ``weight`` is the weight of the tenant that the run's id names.
    """

    id: str
    spec: Annotated[ScoreSpec, BeforeValidator(_parse_spec)]
    queue: Annotated[str, Field(min_length=1)]
    ttl: Count
    max_retries: Count
    created: Seconds
    rows: Annotated[Count | None, BeforeValidator(none_if_empty)] = None
    weight: Weight = 1.0

    @property
    def inputs(self) -> Inputs:
        return self.spec.inputs

    @property
    def priority(self) -> Priority:
        return priority_of(self.id)

    def fields(self) -> dict[str, str | int | float]:
        return {
            **self.model_dump(exclude={"id", "spec"}),
            "format": FORMAT,
            "spec": self.spec.model_dump_json(),
            "rows": "" if self.rows is None else self.rows,
        }


class Settled(NamedTuple):
    """Facts that a run's first worker decides for all chunks, such as the precision.

    Attributes
    ----------
    precision
        The precision of all chunks, if the spec leaves it open, as ``auto`` does. ``None`` if the spec names
        the precision.
    revision
        The model's commit, or the digest of its content; ``None`` if unknown.
    kind
        For a deterministic run, what the worker's scores depend on (`ChunkStats.kind`). ``None`` for any
        other run.
    """

    precision: str | None
    revision: str | None
    kind: str | None = None


def settled_by(spec: ScoreSpec, precision: str, revision: str | None, kind: str | None) -> Settled:
    """Return the facts that a worker proposes for all chunks of a run.

    The worker proposes its precision only if the spec leaves the precision open, as ``auto`` does, and the
    rows get scores.

    Parameters
    ----------
    spec
        The run's spec.
    precision, revision
        The worker's precision, and the revision of its model.
    kind
        The worker's `ChunkStats.kind`.
    """
    is_open = spec.precision in OPEN_PRECISIONS and spec.inputs != "tokens"
    return Settled(precision if is_open else None, revision, kind)


class Progress(WireModel):
    """How many rows of a run are done; a row is done when its chunk is finished.

    Times are in seconds since 1970, and are 0 until the run's first scores.

    Attributes
    ----------
    rows, at
        Number of rows that were done at the time ``at``.
    row_errors
        Number of done rows that have no score.
    since, since_rows
        An earlier time, usually half a minute before ``at``, and the rows that were done then.
    """

    rows: Count = 0
    row_errors: Count = 0
    since: Seconds = 0.0
    since_rows: Count = 0
    at: Seconds = 0.0

    def rows_per_second(self, now: float) -> float | None:
        """Return the run's recent speed in rows per second, or ``None`` if it is unknown.

        The speed is unknown if ``at`` is long before `now` (s since 1970). Long means more than half a
        minute, and also more than the time from ``since`` to ``at``.
        """
        fresh, span = self.rows - self.since_rows, self.at - self.since
        is_recent = now - self.at <= max(span, _QUIET_SECONDS)
        return fresh / span if fresh > 0 and span > 0 and is_recent else None

    def seconds_left(self, total: int | None, now: float) -> float | None:
        """Return the seconds until all `total` rows of the run are done, or ``None`` if that is unknown."""
        speed = self.rows_per_second(now)
        return None if total is None or speed is None else max(total - self.rows, 0) / speed


class RowError(WireModel):
    """A row without a score; rows are counted from 0."""

    row: Count
    error: str
    attempts: Count
    worker: str


def new_run(
    spec: ScoreSpec,
    *,
    queue: str,
    ttl: int,
    max_retries: int,
    rows: int | None = None,
    priority: Priority | None = None,
    tenant: Tenant = NOBODY,
) -> Run:
    """Make a new run, which is not in Redis yet. Without a `priority`, the number of rows decides the
    priority.
    """
    return Run(
        id=new_run_id(choose_priority(priority, rows), tenant.name),
        weight=tenant.weight,
        spec=spec,
        queue=queue,
        ttl=ttl,
        max_retries=max_retries,
        created=system.now(),
        rows=rows,
    )


def read_run(run_id: str, raw: Mapping[bytes, bytes]) -> Run:
    """Read a run from its hash; raises `WireError` if the fields are damaged or have another format."""
    if b"format" not in raw:
        raise WireError(f"run {run_id} is damaged: it has no format")
    return Run.read_fields({**raw, b"id": run_id.encode()}, f"run {run_id}")
