"""How often a chunk is tried, how long the pauses between attempts are, and which chunks a worker scores
without others.

A chunk has one attempt, and up to ``max_retries`` further ones after failures. After the last one, a worker
reports the failure (`rankmill.jobs.protocol.recovery`). The producer then splits the chunk or gives it up
(`rankmill.producer.collect.collector`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rq.job import Job, Retry

from rankmill.jobs.system import Backoff

if TYPE_CHECKING:
    from rankmill.jobs.contract.run import Run

SUSPECT = "suspect"
"""Key in a job's metadata; its value is true if the job may kill its worker."""

_BACKOFF = Backoff(first=2.0, longest=60.0, jitter=0.5)

LONGEST_PAUSE = 2 * _BACKOFF.longest
"""No pause between two attempts is longer than this (s), jitter included."""


def retries(most: int, failed: int) -> Retry | None:
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
    job.meta[SUSPECT] = True
    job.retry_intervals = None


def is_suspect(job: Job) -> bool:
    """Return whether a worker must score the job by itself, because the job may kill the worker."""
    return bool(job.meta.get(SUSPECT))
