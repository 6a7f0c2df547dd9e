"""Defines the RQ jobs of a ScoringWorker, which can ask only for scores, and how the worker ends a job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property
from types import TracebackType
from typing import Any

import redis
from redis.client import Pipeline
from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.job_lifecycle import format_exc_info
from rq.registry import StartedJobRegistry
from rq.utils import now, utcformat
from rq.worker import SimpleWorker

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ForeignJobError, RankmillError
from rankmill.jobs.contract.job import BASE_TIMEOUT, JOB_FUNCTION, chunk_of
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.priority import run_id_of_request
from rankmill.jobs.protocol.leases import RQ_DELAY, hold, move
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.pairs_job import DAY, PAIRS_FUNCTION
from rankmill.jobs.protocol.rq import enqueue, let_expire, record_failure
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.protocol.set_aside import read_job, unpacked
from rankmill.jobs.runtime.patience import sending
from rankmill.workers.backends.base import DeviceLost

_BEAT = Script("workers/rq/lua/beat.lua")
_BEGIN = Script("workers/rq/lua/begin.lua")

logger = logging.getLogger(__name__)


class Executions(ExecutionRegistry):
    """The executions of a job that are both listed and stored in Redis.

    An execution is RQ's record that a worker holds the job. RQ (3.0) cannot delete a job with an execution
    that is listed but not stored. A dead worker's execution stays listed for a minute after its data have
    expired.
    """

    def get_executions(self, start: int = 0, end: int = -1) -> list[Execution]:
        executions = []
        for execution_id in self.get_execution_ids(start, end):
            with suppress(ValueError, KeyError, OverflowError):  # the execution is gone or damaged
                executions.append(Execution.fetch(execution_id, self.job_id, self.connection))
        return executions


class LeasedJobs(StartedJobRegistry):
    """RQ's registry of started jobs, which are the claimed jobs, each with a lease.

    Leases end by the clock of Redis, because the clocks of hosts differ.
    """

    def add_execution(self, execution: Execution, pipeline: Pipeline, ttl: int = 0, xx: bool = False) -> int:
        """Begin the lease of a claimed job; with `xx`, only renew a lease that exists."""
        hold(pipeline, self.key, execution.composite_key, ttl + RQ_DELAY, only_renew=xx)
        return 0  # the real reply is among the pipeline's replies


class ScoringJob(Job):
    """A job that can ask only for scores. It names a chunk of a run, or contains pairs.

    RQ imports and calls any function, callback and webhook that a job in Redis names. So anyone who can write
    to the queue could run any code on every worker. A ScoringWorker calls nothing that a job names.
    """

    @property
    def has_pairs(self) -> bool:
        return self.func_name == PAIRS_FUNCTION

    @cached_property
    def chunk(self) -> tuple[str, ChunkId]:
        """The id of the run, and the chunk to score. A job that contains its pairs counts as a run of one
        chunk.

        Raises
        ------
        ForeignJobError
            The job asks for something other than scores.
        WireError
            The job's arguments do not name a run and a chunk.
        """
        if self.has_pairs:
            return run_id_of_request(self.id), 0
        if self.func_name != JOB_FUNCTION:
            raise ForeignJobError(
                f"job {self.id} asks for {self.func_name}; "
                f"a ScoringWorker runs nothing but {JOB_FUNCTION} and {PAIRS_FUNCTION}"
            )
        return chunk_of(self)

    @property
    def run_ttl(self) -> int:
        """The run's expiry in seconds: the job's ``failure_ttl`` if that is positive, and a day otherwise."""
        ttl = int(self.failure_ttl or 0)
        return ttl if ttl > 0 else DAY

    @property
    def begin_seconds(self) -> int:
        """Seconds allowed to fetch and tokenize, without loading the model."""
        return BASE_TIMEOUT if self.has_pairs else int(self.timeout or 0)

    def heartbeat(
        self, timestamp: datetime, ttl: int, pipeline: Pipeline | None = None, xx: bool = False
    ) -> None:
        """Write a heartbeat as RQ does, but with `xx` write nothing for a job that is gone.

        For such a job, RQ would make a hash with one field. If the worker then died, the hash would never
        expire.
        """
        if not xx:
            super().heartbeat(timestamp, ttl, pipeline)
            return
        client: Any = self.connection if pipeline is None else pipeline
        self.last_heartbeat = timestamp
        _BEAT.run(client, [self.key], utcformat(timestamp))

    def retry(self, queue: Queue, pipeline: Pipeline) -> None:
        """Schedule the job's next attempt as RQ does, but entirely within the pipeline.

        RQ itself would write the status before the pipeline runs. If the server has lost the job, that makes
        a hash that never expires.
        """
        if not (interval := self.get_retry_interval()):
            super().retry(queue, pipeline)
            return
        assert self.retries_left
        self.retries_left -= 1
        self.set_status(JobStatus.SCHEDULED, pipeline=pipeline)
        queue.schedule_job(self, now() + timedelta(seconds=interval), pipeline=pipeline)

    def begin(self, execution: Execution, queue: OrderedQueue, pipeline: Pipeline) -> None:
        """Start the job for a worker. The pipeline's reply says whether it was started.

        The job is not started if it is gone or over, if another worker has tried it since it was read, or if
        another execution has a lease. A started job is removed from the lists in which it may still wait. It
        expires with its run, or never if its ``failure_ttl`` is -1.
        """
        self.worker_name, self._status = execution.worker_name, JobStatus.STARTED
        self.last_heartbeat = self.started_at = now()
        since = utcformat(self.started_at)
        places = [self.execution_registry.key, self.started_job_registry.key, self.key]
        places += [queue.intermediate_queue_key, queue.key]
        places += [queue.waiting_list(self.id), keys.waits(queue.name)]
        fields = ["status", "started", "worker_name", self.worker_name]
        times = ["started_at", since, "last_heartbeat", since]
        retries = "" if self.retries_left is None else self.retries_left
        expiry = -1 if self.failure_ttl == -1 else self.run_ttl
        _BEGIN.run(pipeline, places, execution.id, self.id, retries, expiry, *fields, *times)

    def perform(self) -> None:
        """Raise `ForeignJobError`: RQ would call the job's function here, and no code of a job may run."""
        raise ForeignJobError(f"job {self.id} can be run only by ScoringWorker's own loop")

    @property
    def started_job_registry(self) -> LeasedJobs:
        return LeasedJobs(
            self.origin, connection=self.connection, job_class=type(self), serializer=self.serializer
        )

    @property
    def execution_registry(self) -> Executions:
        return Executions(self.id, self.connection)

    @property
    def success_callback(self) -> None:
        """Always ``None``: the worker ignores a callback that the job names."""

    @property
    def failure_callback(self) -> None:
        """Always ``None``: the worker ignores a callback that the job names."""

    @property
    def stopped_callback(self) -> None:
        """Always ``None``: the worker ignores a callback that the job names."""

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send nothing: webhooks of a job are ignored."""


class JobReplaced(Exception):
    """A job was deleted while a worker scored it, or someone has enqueued other work with the same id."""


class _EndingQueue(OrderedQueue):
    """The queue of a job that succeeds. RQ's transaction ends the job only if Redis still has this job."""

    def move_dependents_to_ready(self, job: Job, pipeline: Any = None, *more: Any) -> dict[str, list[str]]:
        """Raise `JobReplaced` if Redis no longer has this job. RQ calls this between WATCH and MULTI."""
        pipeline.watch(job.key)
        data = pipeline.hget(job.key, "data")
        if data is None or unpacked(data) != job.data:
            raise JobReplaced
        return super().move_dependents_to_ready(job, pipeline, *more)


class HeldJob:
    """A job that a worker has claimed, until it ends or is handed back.

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
        connection: Any = self.job.connection
        status = connection.hget(self.job.key, "status")
        return status not in {None, JobStatus.CANCELED.value.encode()}

    def asks_the_same(self) -> bool:
        """Return whether the job in Redis still has the arguments that this worker has read.

        The result is false if someone has enqueued other work with the same id, and true if the job is gone.
        Raises `DamagedJob`.
        """
        connection: Any = self.job.connection
        data = connection.hget(self.job.key, "data")
        return data is None or unpacked(data) == self.job.data

    def hand_back(self) -> None:
        """Put the job back into its queue, as the next job of its run, in one transaction.

        This does not use up an attempt. If someone has enqueued other work with the same id meanwhile, that
        work is put back. Raises `DamagedJob`.
        """
        # Read the job again, because RQ writes all of a job's fields, and would overwrite the other work.
        job = read_job(self.queue, self.job.id.encode()) or self.job

        def put_back(pipe: Pipeline) -> None:
            self._worker.cleanup_execution(self.job, pipe, self._execution)  # ends the renewal of the lease
            enqueue(self.queue, job, pipe, at_front=True)

        self._move(put_back)

    def finish(self, write: Callable[[Pipeline], object]) -> None:
        """End the job and run the commands that `write` adds, in one transaction that can be repeated.

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
        """Record a failed attempt as RQ does, unless another worker has the job by now."""
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
        """Record the last attempt as failed through RQ, which also sees to the jobs that depend on it."""
        let_expire(self.job)
        self._worker._finalize_failure(self.job, self.queue, self._execution, _told(error))

    def succeed(self, value: object) -> None:
        """End the job through RQ, and try again if the connection breaks meanwhile.

        Raises
        ------
        JobReplaced
            Redis has no job with this id, or another job, which must not get this result.
        """
        queue = _EndingQueue(self.queue.name, connection=self.job.connection, serializer=self.job.serializer)
        while True:
            try:
                self._worker._finalize_success(self.job, queue, self._execution, value)
                return
            except (redis.ConnectionError, redis.TimeoutError):  # redis-py repeats nothing after WATCH
                logger.debug("a connection was lost while RQ ended the job; again")

    def drop(self) -> None:
        with self._worker.connection.pipeline() as pipe:
            self._worker.cleanup_execution(self.job, pipe, self._execution)
            pipe.execute()

    def _move(self, do: Callable[[Pipeline], object]) -> None:
        leases, entry = self.queue.started_job_registry.key, self._execution.composite_key
        move(self._worker.connection, leases, entry, self.job.key, do)


def _told(error: Exception) -> tuple[type[Exception], Exception, TracebackType | None]:
    """Return an error's type, the error and its traceback, or no traceback if rankmill explains the error."""
    explained = isinstance(error, RankmillError | DeviceLost)
    return type(error), error, None if explained else error.__traceback__
