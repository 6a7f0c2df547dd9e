"""Jobs whose worker failed or died: what becomes of them, and what their run is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from rq import Queue
from rq.exceptions import AbandonedJobError
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE
from rq.job import Job
from rq.registry import clean_registries
from rq.utils import now

from jobs import keys
from jobs.errors import WireError
from jobs.job import attempt, suspect
from jobs.results import ChunkFailure
from jobs.runs import RunStore
from jobs.runtime.logs import about, about_job

FailureHandler = Callable[[Job, type[BaseException], BaseException, TracebackType | None], None]

logger = logging.getLogger(__name__)


def failure_handler(store: RunStore) -> FailureHandler:
    """An RQ exception handler that tells the run of a chunk that has failed for the last time."""

    def handle(
        job: Job, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        died = kind is AbandonedJobError
        if died:
            suspect(job)
        with about_job(job.id), about(worker=job.worker_name or "unknown"):
            logger.warning(
                "the worker died, or cannot reach Redis; the chunk %s"
                if died
                else "an attempt at the chunk failed; it %s",
                "runs again" if job.should_retry else "is given up",
            )
        ours = keys.parse_job_id(job.id)  # not from its arguments: they may be what is wrong
        if job.should_retry or ours is None:
            return
        try:
            run = store.load(ours[0])
        except WireError:
            return  # not for this release to answer
        if run is None:
            return
        reason = "its worker died" if died else f"{kind.__name__}: {error}"
        attempts = attempt(run, job)
        message = f"given up after attempt {attempts}: {reason}"
        worker = job.worker_name or ""
        failure = ChunkFailure(
            chunk=ours[1], message=message, fatal=False, attempts=attempts, worker=worker, died=died
        )
        store.write_result(run, failure)

    return handle


def hand_on_jobs(store: RunStore, queue_name: str, worker: str) -> int:
    """Put what a dead worker was running back into the queue at once, its leases notwithstanding.

    Parameters
    ----------
    store
        The server.
    queue_name
        The queue the worker listened on.
    worker
        RQ name of a worker that is known to be dead.

    Returns
    -------
    int
        How many jobs it was running.
    """
    queue = store.queue(queue_name)
    running = store.redis.smembers(WORKER_EXECUTIONS_KEY_TEMPLATE.format(worker))
    if running:
        store.redis.zadd(queue.started_job_registry.key, dict.fromkeys(running, 0), xx=True)
        clean_registries(queue, [failure_handler(store)])
    return len(running)


def enqueue_due(queue: Queue) -> None:
    """Put jobs back into the queue whose pause after a failed attempt is over.

    RQ leaves it to a scheduler, a process of its own that a worker may start.
    """
    paused = queue.scheduled_job_registry
    for job_id in paused.get_jobs_to_schedule():
        job = queue.fetch_job(job_id)
        with queue.connection.pipeline() as pipe:
            if job:
                queue._enqueue_job(job, pipeline=pipe)  # as RQ's scheduler does
            paused.remove(job_id, pipeline=pipe)
            pipe.execute()


def rescue_unbegun(queue: Queue, seconds: int) -> None:
    """Put jobs back that left the queue but reached no worker: the reply that brought them was lost.

    RQ does so after a minute and counts it as a failed attempt; beginning a job takes milliseconds,
    and these were none.

    Parameters
    ----------
    queue
        The queue; only one process may do this at a time.
    seconds
        How long they must have been seen so.
    """
    waiting, redis = queue.intermediate_queue, queue.connection
    for job_id in waiting.get_job_ids():
        if job_id in queue.started_job_registry or waiting.set_first_seen(job_id):
            continue
        seen = waiting.get_first_seen(job_id)
        if seen and now() - seen > timedelta(seconds=seconds):
            with redis.pipeline() as pipe:
                pipe.lrem(waiting.key, 1, job_id)
                queue.push_job_id(job_id, pipeline=pipe, at_front=True)
                pipe.delete(waiting.get_first_seen_key(job_id))
                pipe.execute()
