"""Names of the Redis keys rankmill owns. Every one of them has an expiry.

RQ's own keys (queues, jobs, workers, registries) start with ``rq:`` and are RQ's business.
"""

from __future__ import annotations

from typing import Literal

PREFIX = "rankmill"


def run(run_id: str) -> str:
    """Hash: spec, queue, state and creation time of a run."""
    return f"{PREFIX}:run:{run_id}:meta"


def pairs(run_id: str, chunk: int | Literal["*"]) -> str:
    """String: the Arrow payload of a chunk that waits to be scored; ``*`` matches every chunk's."""
    return f"{PREFIX}:run:{run_id}:pairs:{chunk}"


def results(run_id: str) -> str:
    """Stream: one entry for each finished chunk, until the producer has taken it."""
    return f"{PREFIX}:run:{run_id}:results"


def progress(run_id: str) -> str:
    """String: how far a run has come, as JSON."""
    return f"{PREFIX}:run:{run_id}:progress"


def errors(run_id: str) -> str:
    """List: the first rows of a run that have no score, each as JSON."""
    return f"{PREFIX}:run:{run_id}:errors"


def cancelled(run_id: str) -> str:
    """String: there if somebody else than its producer has cancelled the run, until that knows."""
    return f"{PREFIX}:run:{run_id}:cancelled"


def precision(run_id: str) -> str:
    """String: what ``precision: auto`` has come to mean for the run, once a worker has begun it."""
    return f"{PREFIX}:run:{run_id}:precision"


def refusals(run_id: str) -> str:
    """Hash: workers that cannot score the run, each with its reason."""
    return f"{PREFIX}:run:{run_id}:refusals"


def runs() -> str:
    """Sorted set: ids of all runs, by the time (s since 1970) when they end if nobody works on them."""
    return f"{PREFIX}:runs"


def probe() -> str:
    """String: written to see whether the server takes writes; gone at once."""
    return f"{PREFIX}:probe"


def set_aside() -> str:
    """List: jobs that could not be read, and why, each as JSON; the last ones."""
    return f"{PREFIX}:set-aside"


def worker(name: str) -> str:
    """String: the report of a live ScoringWorker, as JSON, under its RQ worker name."""
    return f"{PREFIX}:worker:{name}"


def job_id(run_id: str, chunk: int) -> str:
    """RQ's id of the job that scores a chunk."""
    return f"{run_id}-{chunk}"


def parse_job_id(job: str) -> tuple[str, int] | None:
    """Run and chunk of a job id, ``None`` if it is none of ours.

    >>> parse_job_id(job_id("0af", 7))
    ('0af', 7)
    """
    run_id, _, chunk = job.rpartition("-")
    return (run_id, int(chunk)) if run_id and chunk.isdecimal() else None
