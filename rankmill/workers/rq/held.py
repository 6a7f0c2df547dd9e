"""A job that a worker holds: tells RQ that it is done, has failed, or is handed back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import redis
from redis.client import Pipeline
from rq.executions import Execution
from rq.job import JobStatus
from rq.job_lifecycle import format_exc_info
from rq.utils import now
from rq.worker import SimpleWorker

from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.protocol.leases import move
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.rq import enqueue, let_expire, record_failure
from rankmill.jobs.runtime.patience import sending
from rankmill.workers.rq.job import ScoringJob

logger = logging.getLogger(__name__)


class HeldJob:
    """A job that `RQWorker.claim` has begun.

    Parameters
    ----------
    worker, job, queue
        The worker that holds the job, the job, and its queue.
    execution
        RQ's record that the worker holds the job; the lease is stored under its id.
    """

    def __init__(
        self, worker: SimpleWorker, job: ScoringJob, queue: OrderedQueue, execution: Execution
    ) -> None:
        self.job = job
        self.queue = queue
        self._worker = worker
        self._execution = execution

    def is_wanted(self) -> bool:
        """Whether the job still exists and is not cancelled."""
        connection: Any = self.job.connection
        status = connection.hget(self.job.key, "status")
        return status not in {None, JobStatus.CANCELED.value.encode()}

    def hand_back(self) -> None:
        """Put the job back, in one transaction; this does not count as an attempt.

        It is the next job of its run, which gets its turn back.
        """

        def put_back(pipe: Pipeline) -> None:
            self._worker.cleanup_execution(self.job, pipe, self._execution)
            enqueue(self.queue, self.job, pipe, at_front=True)

        self._worker.executions.pop(self._execution.id, None)  # even if another worker already has the job
        self._move(put_back)

    def finish(self, write: Callable[[Pipeline], object]) -> None:
        """End the job in one transaction with what `write` adds; without WATCH, so that it can be repeated.

        Raises
        ------
        ValueRefused
            The server refuses what `write` adds; the job is not ended.
        """
        worker, job = self._worker, self.job
        with worker.connection.pipeline() as pipe:
            write(pipe)
            worker.increment_successful_job_count(pipeline=pipe)
            if job.started_at:
                worker.increment_total_working_time(now() - job.started_at, pipe)
            worker.cleanup_execution(job, pipe, self._execution)
            pipe.delete(job.key, job.execution_registry.key)
            with sending(worker.connection, pipe):
                pipe.execute()

    def fail(self, error: Exception) -> None:
        """Record a failed attempt as RQ does, but only once: after a lost reply, another worker may have the
        job.
        """
        worker, job, failure = self._worker, self.job, _told(error)
        job.ended_at = now()
        worker.handle_exception(job, *failure)

        def end(pipe: Pipeline) -> None:
            worker.cleanup_execution(job, pipe, self._execution)
            worker.increment_failed_job_count(pipe)
            if job.started_at and job.ended_at:
                worker.increment_total_working_time(job.ended_at - job.started_at, pipe)
            if job.should_retry:
                job.retry(self.queue, pipe)
            else:
                record_failure(job, format_exc_info(failure), pipe)

        self._move(end)

    def fail_for_good(self, error: Exception) -> None:
        """Record the last attempt as RQ does, with all consequences, such as for jobs that depend on this
        one.
        """
        let_expire(self.job)
        self._worker._finalize_failure(self.job, self.queue, self._execution, _told(error))

    def succeed(self, value: object) -> None:
        """End the job as RQ does; try again if RQ raises, having lost a connection while it watched keys."""
        while True:
            try:
                self._worker._finalize_success(self.job, self.queue, self._execution, value)
                return
            except (redis.ConnectionError, redis.TimeoutError):  # redis-py has tried once to end the WATCH
                logger.debug("a connection was lost while RQ ended the job; again")

    def drop(self) -> None:
        """Let go of a job that no one wants any more."""
        with self._worker.connection.pipeline() as pipe:
            self._worker.cleanup_execution(self.job, pipe, self._execution)
            pipe.execute()

    def _move(self, do: Callable[[Pipeline], object]) -> None:
        leases, entry = self.queue.started_job_registry.key, self._execution.composite_key
        move(self._worker.connection, leases, entry, self.job.key, do)


def _told(error: Exception) -> tuple[type[Exception], Exception, TracebackType | None]:
    """An error as RQ's handlers take it; without a traceback if rankmill explains the error."""
    return type(error), error, None if isinstance(error, RankmillError) else error.__traceback__
