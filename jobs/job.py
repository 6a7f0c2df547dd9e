"""The RQ job of a chunk: what it carries, how often it is tried, and which workers can do it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter
from rq import Queue
from rq.job import Job, Retry

from jobs import keys
from jobs.errors import WireError
from jobs.runtime.tracing import TRACE

if TYPE_CHECKING:
    from jobs.run import Run

JOB_FUNCTION = "jobs.score_chunk"

_SUSPECT = "suspect"
"""Key in a job's metadata."""

_MAX_BACKOFF = 60
"""Seconds between two attempts at a chunk, at most."""

_BASE_TIMEOUT = 900
"""Seconds a job may take before its first pair: a model may have to be downloaded and loaded."""

_SECONDS_PER_PAIR = 2
"""Slower than any model on any device we know; a dead worker is noticed by heartbeat, not by this."""


class Payload(NamedTuple):
    """A chunk's pairs as they travel, how many they are, and what their trace is, if there is one.

    A ``suspect`` chunk may kill its worker: it will be alone in one, and is run but once, so that it
    can be split, until there is a single row in it.
    """

    pairs: bytes
    rows: int
    trace: Mapping[str, str] = MappingProxyType({})
    suspect: bool = False


def job_data(run: Run, chunk: int, payload: Payload) -> Any:
    """What RQ is to make a job of, for `Queue.enqueue_many`."""
    return Queue.prepare_data(
        JOB_FUNCTION,
        args=(run.id, chunk),
        job_id=keys.job_id(run.id, chunk),
        timeout=_BASE_TIMEOUT + _SECONDS_PER_PAIR * payload.rows,
        ttl=run.ttl,
        result_ttl=0,
        failure_ttl=run.ttl,
        retry=_retries(run.max_retries) if payload.rows == 1 or not payload.suspect else None,
        meta={_SUSPECT: payload.suspect, **({TRACE: dict(payload.trace)} if payload.trace else {})},
    )


def _retries(most: int) -> Retry | None:
    """That many more attempts, after pauses that double, with jitter: about 2 s, 4 s, 8 s …"""
    if not most:
        return None
    pauses = [min(2.0**number, _MAX_BACKOFF) for number in range(1, most + 1)]
    return Retry(max=most, interval=[round(pause * random.uniform(0.5, 1.5)) for pause in pauses])  # noqa: S311


_ARGUMENTS = TypeAdapter(tuple[str, Annotated[int, Field(ge=0)]])


def chunk_of(job: Job) -> tuple[str, int]:
    """The run's id and the chunk's number, as `job` has them for arguments.

    Raises
    ------
    WireError
        They are something else.
    """
    try:
        if job.kwargs:
            raise ValueError("named arguments")
        return _ARGUMENTS.validate_python(tuple(job.args), strict=True)
    except ValueError:
        raise WireError(f"job {job.id}: the arguments must be a run's id and a chunk's number") from None


def attempt(run: Run, job: Job) -> int:
    """Which attempt at its chunk `job` is, from 1; RQ keeps only the retries that are left."""
    left = run.max_retries if job.retries_left is None else job.retries_left
    return 1 + run.max_retries - left


def suspect(job: Job) -> None:
    """Note that a worker died while it had the job, which may be why; its retry need not wait."""
    job.meta[_SUSPECT] = True
    job.retry_intervals = None


def is_suspect(job: Job) -> bool:
    """Whether the job should be alone in its worker: it may kill it, and others would be blamed."""
    return bool(job.meta.get(_SUSPECT))


def worker_command(queue: str) -> str:
    """The command that starts a worker for `queue`, as the README shows it."""
    return f"rq worker {queue} --worker-class workers.ScoringWorker --serializer json"


def wrong_worker_message(queue: str) -> str:
    """One line for a queue with workers that cannot score."""
    return (
        f"queue {queue!r} is served by a plain RQ worker, which cannot score; "
        f"start its workers with: {worker_command(queue)}"
    )
