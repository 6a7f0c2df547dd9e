"""Taking jobs off queues, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from rq import Queue

from jobs.set_aside import DamagedJob, read_job, set_aside
from workers import metrics
from workers.rq_job import ScoringJob


def take_job(
    queues: Sequence[Queue], seconds: int | None, claimed: Collection[str], stopped: Callable[[], bool]
) -> tuple[ScoringJob, Queue] | None:
    """The next job that can be read; those that cannot are set aside.

    Parameters
    ----------
    queues
        Where to look, in this order; their jobs are ScoringJobs.
    seconds
        How long to wait for a job; ``None`` does not wait.
    claimed
        Ids of jobs that this worker has already: a queue may hold an id twice.
    stopped
        Says whether to take no more.

    Returns
    -------
    The job and its queue; ``None`` if there was none.
    """
    while not stopped():
        found = _pop(queues, seconds)
        if found is None:
            return None
        raw_id, queue = found
        try:
            job = read_job(queue, raw_id)
        except DamagedJob as error:
            set_job_aside(queue, raw_id, str(error))
            continue
        if job is not None and job.id not in claimed:
            return cast("ScoringJob", job), queue
        cast("Any", queue.connection).lrem(queue.intermediate_queue_key, 1, raw_id)
    return None


def set_job_aside(queue: Queue, raw_id: bytes, reason: str) -> None:
    """Set a job aside and count it."""
    set_aside(queue, raw_id, reason)
    metrics.set_aside.inc()


def _pop(queues: Sequence[Queue], seconds: int | None) -> tuple[bytes, Queue] | None:
    """A job's id, as RQ's workers take it: by way of an intermediate list where there is one queue."""
    connection: Any = queues[0].connection
    if len(queues) == 1:
        (queue,) = queues
        lists = queue.key, queue.intermediate_queue_key
        raw_id = connection.lmove(*lists) if seconds is None else connection.blmove(*lists, seconds)
        return None if raw_id is None else (raw_id, queue)
    by_key = {queue.key.encode(): queue for queue in queues}
    if seconds is not None:
        found = connection.blpop(list(by_key), seconds)
        return None if found is None else (found[1], by_key[found[0]])
    popped = ((connection.lpop(key), queue) for key, queue in by_key.items())
    return next(((raw_id, queue) for raw_id, queue in popped if raw_id is not None), None)
