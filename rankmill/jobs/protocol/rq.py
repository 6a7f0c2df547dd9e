"""Functions that use private parts of RQ, for producers and workers. No other module of `rankmill.jobs` uses
them.

`tests/workers/rq/test_contract.py` names every part of RQ used here, and fails when RQ changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from redis.client import Pipeline
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE
from rq.job import Job
from rq.job_lifecycle import record_job_failure
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from rankmill.jobs.protocol.leases import hold
from rankmill.jobs.system import system

ALL_WORKERS = REDIS_WORKER_KEYS

WORKER_PREFIX = f"{RQ_KEY_PREFIX}:worker:"

_FAILED_SECONDS = 7 * 86400


def workers_of(queue: str) -> str:
    """Key of the set that lists the workers of a queue. Each worker is listed by the key of its hash."""
    return WORKERS_BY_QUEUE_KEY % queue


def executions_of(worker: str) -> str:
    """Key of the set of the jobs that a worker runs, each with its execution: ``<job>:<execution>``."""
    return WORKER_EXECUTIONS_KEY_TEMPLATE.format(worker)


def enqueue(queue: Queue, job: Job, pipe: Pipeline, *, at_front: bool = False) -> None:
    """Put a job that RQ already knows into a queue. `Job.retry` and RQ's scheduler do the same."""
    queue._enqueue_job(job, pipeline=pipe, at_front=at_front)


def save_jobs(queue: Queue, jobs: list[Any], pipe: Pipeline) -> None:
    """Save new jobs of a queue, which `Queue.prepare_data` has made, without putting them into a list."""
    saving = RQQueue(queue.name, connection=queue.connection, serializer=queue.serializer)
    saving.enqueue_many(jobs, pipeline=pipe)


def restored(queue: Queue, job_id: str, fields: Mapping[bytes, bytes]) -> tuple[Job, bool]:
    """Make a job from its hash. Also returns whether its metadata could be read. RQ's errors are not
    caught.
    """
    job: Job = queue.job_class(job_id, connection=queue.connection, serializer=queue.serializer)
    job.restore(fields)
    return job, job._unreadable_meta is None


def record_failure(job: Job, reason: str, pipe: Pipeline) -> None:
    """Record in a pipeline that a job has failed for good, as RQ does."""
    let_expire(job)
    record_job_failure(job, reason, pipe)


def let_expire(job: Job) -> None:
    """Let a failing job expire in a week, unless the job's caller has set an expiry. RQ's own default is a
    year.
    """
    if job.failure_ttl is None:
        job.failure_ttl = _FAILED_SECONDS


class RQQueue(Queue):
    """RQ's queue, except that a subclass chooses the list in which a job waits (`place`).

    Pauses of jobs end by the server's clock.
    """

    def push_job_id(self, job_id: str | bytes, pipeline: Any = None, at_front: bool = False) -> None:
        """Put a job's id into the list that `place` chooses. RQ calls this whenever it enqueues a job."""
        self.place(self.connection if pipeline is None else pipeline, job_id, at_front=at_front)

    def place(self, client: Any, job_id: str | bytes, *, at_front: bool) -> None:
        """Put a job's id into the list where it waits. Subclasses override this; here it does nothing."""

    def schedule_job(
        self, job: Job, when: datetime, pipeline: Pipeline | None = None, unique: bool = False
    ) -> Job:
        """Let a job pause for the time from now to `when`. The pause ends by the server's clock."""
        pipe = pipeline if pipeline is not None else self.connection.pipeline()
        super().schedule_job(job, when, pipe, unique)
        seconds = when.timestamp() - system.now()
        hold(pipe, self.scheduled_job_registry.key, job.id, seconds, only_renew=False)
        if pipeline is None:
            pipe.execute()
        return job
