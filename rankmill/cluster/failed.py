"""Lists and clears jobs that failed for good, and jobs that no worker could read; retries failed jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.results import Result

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.contract.job import JOB_FUNCTION
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import SET_ASIDE, DamagedJob, read_job

MOST = 100
"""At most this many failed jobs of each queue are listed, the latest ones."""

_OURS = "rankmill."
"""Prefix of the names of the functions that rankmill's jobs call."""

_UNREADABLE = "no worker can read it"
_OF_A_RUN = "its run has its failure already: score what has no score again, with --reuse for the rest"
_AGAIN = "it was enqueued again since it failed"


class FailedJob(BaseModel):
    """A job that failed for good or was set aside. No worker takes it, unless someone retries it.

    Attributes
    ----------
    state
        ``failed`` after all attempts have failed, ``set aside`` if no worker could read the job.
    at
        When the job failed or was set aside, in seconds since 1970; ``None`` if unknown.
    final
        Why the job cannot be retried; empty if it can.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    queue: str
    state: Literal["failed", "set aside"]
    reason: str
    at: float | None
    final: str


def failed_jobs(client: redis.Redis) -> list[FailedJob]:
    """List the failed jobs and the jobs that were set aside, the latest first.

    At most `MOST` failed jobs of each queue are looked at. A job that calls another application's function is
    listed only if rankmill has used the job's queue lately.

    Raises
    ------
    redis.RedisError, RedisUnavailable
        The server cannot serve.
    """
    connection: Any = client
    store = RunStore(client)
    used = set(connection.zrange(keys.queues(), 0, -1))
    names = [_name(key) for key in connection.smembers(Queue.redis_queues_keys)]
    jobs = [job for name in names for job in _failed(store.queue(name), is_used=name.encode() in used)]
    for damaged in SET_ASIDE.read(client):
        fields = damaged.model_dump(include={"queue", "reason", "at"})
        jobs.append(FailedJob(id=damaged.job, **fields, state="set aside", final=_UNREADABLE))
    return sorted(jobs, key=lambda job: -(job.at or 0.0))


def chosen(jobs: list[FailedJob], ids: Sequence[str]) -> list[FailedJob]:
    """Return the jobs with these ids, or all jobs if `ids` is empty.

    Raises
    ------
    InputError
        One of the ids is not that of a job in `jobs`.
    """
    unknown = set(ids) - {job.id for job in jobs}
    if unknown:
        raise InputError(f"no failed job is called {sorted(unknown)[0]}; rankmill jobs lists them")
    return [job for job in jobs if not ids or job.id in ids]


def retry(client: redis.Redis, job: FailedJob) -> str:
    """Put a failed job back into its queue, for one more attempt. Returns a text that names the queue.

    Raises
    ------
    InputError
        The job cannot be retried, or is no longer among the queue's failed jobs.
    """
    if job.final:
        raise InputError(f"cannot be retried: {job.final}")
    queue = RunStore(client).queue(job.queue)
    try:
        queue.failed_job_registry.requeue(job.id)
    except (NoSuchJobError, InvalidJobOperation):
        raise InputError("cannot be retried: it has expired, or was retried or cleared just now") from None
    return f"put back into queue {job.queue}"


def clear(client: redis.Redis, job: FailedJob) -> str:
    """Remove a job from the failed jobs of its queue, or from the jobs that were set aside.

    A failed job is also deleted, unless it belongs to a run or was enqueued again under its id. Returns the
    word that the command prints for the job.
    """
    connection: Any = client
    if job.state == "set aside":
        SET_ASIDE.forget(client, lambda damaged: damaged.job == job.id)
        return "cleared"
    queue = RunStore(client).queue(job.queue)
    was_listed = connection.zrem(queue.failed_job_registry.key, job.id)
    # the jobs of a run expire with the run, and its producer may read them
    if was_listed and job.final not in {_OF_A_RUN, _AGAIN}:
        connection.unlink(Job.key_for(job.id), _results(job.id))
    return "cleared"


def _name(key: bytes) -> str:
    return key.decode(errors="replace").removeprefix(Queue.redis_queue_namespace_prefix)


def _failed(queue: OrderedQueue, *, is_used: bool) -> Iterator[FailedJob]:
    connection: Any = queue.connection
    for raw in connection.zrange(queue.failed_job_registry.key, -MOST, -1):
        reason, final, at = "it has expired", "it has expired", None
        try:
            job = read_job(queue, raw)
        except DamagedJob as error:
            job, reason, final = None, str(error), _UNREADABLE
        if not (is_used or (job and str(job.func_name).startswith(_OURS))):
            continue
        if job:
            reason, at = _failure(job)
            # RQ leaves a job in this list if its caller enqueues it again
            is_failed = job.get_status(refresh=False) in {JobStatus.FAILED, JobStatus.STOPPED}
            final = _OF_A_RUN if job.func_name == JOB_FUNCTION else "" if is_failed else _AGAIN
        name = raw.decode(errors="backslashreplace")
        yield FailedJob(id=name, queue=queue.name, state="failed", reason=reason, at=at, final=final)


def _results(job: str) -> str:
    key: str = Result.get_key(job)  # type: ignore[no-untyped-call]
    return key


def _failure(job: Job) -> tuple[str, float | None]:
    """Return the last line of a job's last error, and the time when the server got the error (seconds since
    1970). If the error is missing or damaged, a text says so in place of the line.

    Do not return the time when the job ended: RQ does not record this time if the worker has died.
    """
    try:
        failure = job.latest_result()
    except (redis.RedisError, RankmillError):
        raise
    except Exception:  # RQ can raise any type for damaged data
        return "its reason is damaged", None
    if failure is None:
        return "it has left no reason", None
    lines = (failure.exc_string or "").strip().splitlines() or ["it has left no reason"]
    return lines[-1], failure.created_at.timestamp()
