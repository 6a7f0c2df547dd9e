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
"""Redis keeps only the first row errors of a run, at most this many. The list of errors beside the output has
all row errors.
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

    ``rows`` is the number of input rows, ``None`` if the producer did not know it at the start. ``created``
    is in seconds since 1970. ``ttl`` is the expiry in seconds from the latest change to the run. ``weight``
    is the weight of the tenant that the run's id names.
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
            "format": FORMAT,
            "spec": self.spec.model_dump_json(),
            "queue": self.queue,
            "ttl": self.ttl,
            "max_retries": self.max_retries,
            "created": self.created,
            "rows": "" if self.rows is None else self.rows,
            "weight": self.weight,
        }


class Settled(NamedTuple):
    """The facts that a run's first worker decides for all chunks of the run. A field is ``None`` if the first
    worker had nothing to decide for it.

    ``precision`` replaces a precision such as ``auto`` (`OPEN_PRECISIONS`). ``revision`` is the model's
    commit, or the digest of its content. ``kind`` is set for a deterministic run (`ChunkStats.kind`).
    """

    precision: str | None
    revision: str | None
    kind: str | None = None


def settled_by(spec: ScoreSpec, precision: str, revision: str | None, kind: str | None) -> Settled:
    """Return the facts (`Settled`) that a worker proposes for all chunks of a run, from the worker's
    precision, the model's revision and the worker's `kind` (`ChunkStats.kind`). The precision is ``None`` in
    two cases: the spec already names one precision, or the rows are requests for tokens.
    """
    is_open = spec.precision in OPEN_PRECISIONS and spec.inputs != "tokens"
    return Settled(precision if is_open else None, revision, kind)


class Progress(WireModel):
    """How many rows of a run are done; a row is done when its chunk is finished.

    At the time ``at``, the number of done rows was ``rows``; at the earlier time ``since``, it was
    ``since_rows``. The recent speed is computed from these four values. The two times are usually half a
    minute apart. Each time is in seconds since 1970, and is 0 until the run's first scores.
    """

    rows: Count = 0
    row_errors: Count = 0
    since: Seconds = 0.0
    since_rows: Count = 0
    at: Seconds = 0.0

    def rows_per_second(self, now: float) -> float | None:
        """The recent speed in rows per second; ``None`` if it is unknown.

        The speed becomes unknown when no rows were done for too long. Too long is half a minute, or the time
        from ``since`` to ``at`` if that time is longer. `now` is in seconds since 1970.
        """
        fresh, span = self.rows - self.since_rows, self.at - self.since
        is_recent = now - self.at <= max(span, _QUIET_SECONDS)
        return fresh / span if fresh > 0 and span > 0 and is_recent else None

    def seconds_left(self, total: int | None, now: float) -> float | None:
        """Return the seconds until all of the run's `total` rows are done, at the recent speed; ``None`` if
        `total` or the speed is unknown.
        """
        speed = self.rows_per_second(now)
        return None if total is None or speed is None else max(total - self.rows, 0) / speed


class RowError(WireModel):
    """A row without a score, as in the list of errors beside the output; rows are counted from 0."""

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
    """Make a new run, which is not in Redis yet; without a `priority`, the number of rows decides the
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
