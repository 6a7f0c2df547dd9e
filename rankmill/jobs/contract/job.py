"""The RQ job of a chunk, its payload, its attempts, and the workers that can run it.

If the first attempt at a chunk fails, up to ``max_retries`` further attempts follow, with growing pauses. If
the last attempt fails, a worker reports the failure (`rankmill.jobs.protocol.recovery`). The producer then
splits the chunk or gives it up (`rankmill.producer.collect.collector`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rq import Queue
from rq.job import Job, Retry

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.keys import ChunkId, read_chunk_id
from rankmill.jobs.system import Backoff

if TYPE_CHECKING:
    from rankmill.jobs.contract.run import Run

JOB_FUNCTION = "rankmill.score_chunk"

_ROW_TOKENS = "row_tokens"
TRACE = "trace"
_SUSPECT = "suspect"
"""Key in a job's metadata. Its value is true if the job may kill its worker. `_ROW_TOKENS` and `TRACE` are
also keys in this metadata.
"""

BASE_TIMEOUT = 900
"""Part of a job's timeout (s) that does not depend on its number of pairs."""

_SECONDS_PER_PAIR = 2
"""Seconds that a job's timeout allows for each pair, which is more than any known model needs on any known
device. A dead worker is detected by its missing heartbeat, not by this timeout.
"""

_BACKOFF = Backoff(first=2.0, longest=60.0, jitter=0.5)

LONGEST_PAUSE = 2 * _BACKOFF.longest
"""No pause between two attempts is longer than this (s), jitter included."""


class Payload(NamedTuple):
    """The encoded rows of a chunk, and facts about them for its job.

    Attributes
    ----------
    pairs, rows
        The encoded rows, and their number.
    trace
        OpenTelemetry context of the trace that the chunk belongs to; empty without a trace.
    suspect
        Whether the chunk may kill its worker. A worker scores a suspect chunk by itself. The chunk gets only
        one attempt, so that it can be split at once; a single row gets all attempts.
    row_tokens
        Whether the result should have the number of tokens of each row.
    failed
        Number of attempts at the chunk that have failed; the job gets only the remaining ones.
    """

    pairs: bytes
    rows: int
    trace: Mapping[str, str] = MappingProxyType({})
    suspect: bool = False
    row_tokens: bool = False
    failed: int = 0


def job_data(run: Run, chunk: ChunkId, payload: Payload) -> Any:
    """Make the data from which RQ's `Queue.enqueue_many` creates the job of a chunk."""
    return Queue.prepare_data(
        JOB_FUNCTION,
        args=(run.id, str(chunk)),
        job_id=keys.job_id(run.id, chunk),
        timeout=BASE_TIMEOUT + _SECONDS_PER_PAIR * payload.rows,
        ttl=run.ttl,
        result_ttl=0,
        failure_ttl=run.ttl,
        retry=_retries(0 if payload.suspect and payload.rows > 1 else run.max_retries, payload.failed),
        meta={
            _SUSPECT: payload.suspect,
            **({TRACE: dict(payload.trace)} if payload.trace else {}),
            **({_ROW_TOKENS: True} if payload.row_tokens else {}),
        },
    )


def chunk_of(job: Job) -> tuple[str, ChunkId]:
    """Read the run's id and the chunk from the arguments of a job.

    Raises
    ------
    WireError
        The job has other arguments.
    """
    match job.args:
        case [str(run_id), str(name)] if not job.kwargs and (chunk := read_chunk_id(name)) is not None:
            return run_id, chunk
    raise WireError(f"job {job.id}: the arguments must be a run's id and a chunk's name")


def asks_for_row_tokens(job: Job) -> bool:
    """Return whether a job asks for the number of tokens of each row in its chunk's result."""
    return bool(job.meta.get(_ROW_TOKENS))


def _retries(most: int, failed: int) -> Retry | None:
    """Make RQ's `Retry` for a job, or return ``None`` if the job is never retried.

    Parameters
    ----------
    most
        Number of retries that the job has in all.
    failed
        Number of retries that are used up.
    """
    if not most:
        return None
    retry = Retry(max=most, interval=[round(_BACKOFF.pause(failures)) for failures in range(1, most + 1)])
    retry.max -= failed  # the constructor of `Retry` refuses 0
    return retry


def attempt(run: Run, job: Job) -> int:
    """Return the number of the job's current attempt, counted from 1. RQ stores only how many retries are
    left.
    """
    retries_left = run.max_retries if job.retries_left is None else job.retries_left
    return 1 + run.max_retries - retries_left


def suspect(job: Job) -> None:
    """Mark a job that may have killed its worker, and let its retry begin without a pause."""
    job.meta[_SUSPECT] = True
    job.retry_intervals = None


def is_suspect(job: Job) -> bool:
    """Return whether a worker must score the job by itself, because the job may kill the worker."""
    return bool(job.meta.get(_SUSPECT))


def worker_command(queue: str) -> str:
    """Return the command that starts a worker for `queue`."""
    return f"rq worker {queue} --worker-class rankmill.ScoringWorker --serializer json"


def wrong_worker_message(queue: str) -> str:
    """Return the error message for a queue that has only plain RQ workers, which cannot score."""
    return (
        f"queue {queue!r} is served by a plain RQ worker, which cannot score; "
        f"start its workers with: {worker_command(queue)}"
    )


RESUME = "rq resume --url URL, with the URL of this server, lets them take chunks"
"""The way out after ``rq suspend``, which keeps workers from taking chunks."""


def no_workers_message(queue: str, url: str) -> str:
    """Return the error message for a queue without workers, with two commands that start workers."""
    server = shlex.quote(url)
    return (
        f"no worker listens on queue {queue!r} at {server} yet; start workers with: "
        f"score-workers --redis {server} --queue {shlex.quote(queue)} "
        f"(or one worker with: {worker_command(shlex.quote(queue))} --url {server})"
    )
