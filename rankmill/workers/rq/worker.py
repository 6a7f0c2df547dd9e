"""RQ's worker, with RQ's options, signals, records and executions; a subclass adds the loop."""

from __future__ import annotations

import logging
import math
import os
import re
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import redis
from rq import Queue, worker_registration
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty, JobTimeoutException, UnixSignalDeathPenalty
from rq.utils import now
from rq.worker import SimpleWorker
from rq.worker.base import DequeueStrategy, WorkerStatus

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.recovery import failure_handler
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import SCORING_FIELD
from rankmill.jobs.runtime.hosts import worker_name
from rankmill.jobs.system import system
from rankmill.workers.rq.job import HeldJob, ScoringJob

POLL_SECONDS = 1
"""A waiting worker checks at least once in this many seconds whether it must stop."""

_SUSPENSION_SECONDS = 1
"""A worker checks at most once in this many seconds whether ``rq suspend`` was called."""

_NAME_SECONDS = 0.2
"""Seconds between two checks whether a worker's name is free."""

_NO_EXPIRY, _NO_KEY = -1, -2
"""What Redis answers when it is asked for the expiry of a key that never expires, and of a missing key."""

_MADE_UP = re.compile("[0-9a-f]{32}")
"""Matches the name that RQ makes up for a worker that was started without a name."""

_GRACE_SECONDS = 60.0
"""A call that runs this many seconds past its time limit counts as hanging, because it does not react to the
limit's signal.
"""

logger = logging.getLogger(__name__)

JobTimeout = JobTimeoutException


class TooLong(BaseException):
    """A time limit is over. It is not an `Exception`, so that no ``except Exception`` catches it."""


class DeathPenalty(UnixSignalDeathPenalty):
    """A time limit for the main thread, by RQ's alarm signal; it raises `TooLong`.

    While an inner time limit runs, the outer limit does not. The outer limit starts again, with its whole
    time, when the inner limit ends.
    """

    _current: ClassVar[DeathPenalty | None] = None

    def __init__(self, timeout: float, exception: type[BaseException] = TooLong, **_: Any) -> None:
        super().__init__(max(int(timeout), 1), exception)  # type: ignore[no-untyped-call]

    def setup_death_penalty(self) -> None:
        self._outer = DeathPenalty._current
        self._start()

    def cancel_death_penalty(self) -> None:
        super().cancel_death_penalty()  # type: ignore[no-untyped-call]
        DeathPenalty._current = self._outer
        if self._outer:
            self._outer._start()

    def _start(self) -> None:
        self._began, DeathPenalty._current = system.monotonic(), self
        super().setup_death_penalty()  # type: ignore[no-untyped-call]

    @classmethod
    def is_overdue(cls) -> bool:
        """Return whether the main thread hangs: its time limit ended long ago. Other threads call this."""
        limit = cls._current
        return limit is not None and system.monotonic() - limit._began > limit._timeout + _GRACE_SECONDS


class WorkOptions(NamedTuple):
    """The options of ``rq worker`` that the loop follows.

    In a ``burst`` the worker ends when no jobs wait. ``max_idle_time`` is in seconds.
    """

    burst: bool
    log_level: str | None
    date_format: str
    log_format: str
    max_jobs: int | None
    max_idle_time: int | None


class RQWorker(SimpleWorker):
    """A worker that RQ's command line starts, and that `rq info`, `rq suspend` and RQ's signals reach.

    A subclass defines the loop (`run`), and may override what is called at the start, the end and on signals.
    """

    death_penalty_class: type[BaseDeathPenalty] = DeathPenalty
    lease_seconds = 0
    """Seconds for which this worker holds a job unless it renews the lease."""
    _suspension_seen, _suspended = -math.inf, False

    def __init__(self, *args: Any, **options: Any) -> None:
        # Whatever the command line says, nothing is unpickled, and nothing but scoring runs.
        super().__init__(*args, **{**options, "serializer": JSONSerializer, "job_class": ScoringJob})
        ordered = partial(
            OrderedQueue, connection=self.connection, serializer=JSONSerializer, job_class=ScoringJob
        )
        self.queues = [ordered(queue.name) for queue in self.queues]
        self._ordered_queues = self.queues[:]
        self.log_result_lifespan = False
        self.store = RunStore(self.connection)
        self.push_exc_handler(failure_handler(self.store))  # type: ignore[no-untyped-call]

    # Methods that a subclass defines or overrides.

    def run(self, options: WorkOptions) -> bool:
        """Work until a signal or the options say to stop; return whether a job was taken."""
        raise NotImplementedError

    def announce(self) -> None:
        """Publish more about this worker than RQ's record contains; called after the record is written."""

    def signalled(self, signals: int) -> None:
        """Handle a signal to stop: `signals` is 1 for the first signal, and 2 for a signal that ends the
        process immediately.
        """

    def interrupt(self) -> None:
        """End what the main thread is doing, if that may take long. The first signal to stop calls this."""

    # Methods that a subclass uses.

    @property
    def stopping(self) -> bool:
        return self._stop_requested

    def stop(self) -> None:
        """Make the worker stop at its next check. Any thread may call this."""
        self._shutdown()

    @property
    def queues_in_turn(self) -> list[OrderedQueue]:
        """The worker's queues in order of preference, which may change after each job (`reorder_queues`)."""
        return cast("list[OrderedQueue]", self._ordered_queues)

    def limit(self, seconds: float) -> BaseDeathPenalty:
        """Make a context manager for the main thread, which raises `TooLong` after `seconds`."""
        return self.death_penalty_class(seconds, TooLong)

    def listen(self, options: WorkOptions) -> None:
        """Catch signals, register this worker, and listen to RQ's commands."""
        self._install_signal_handlers()  # type: ignore[no-untyped-call]
        self.bootstrap(options.log_level, options.date_format, options.log_format)

    @property
    def suspended(self) -> bool:
        """Whether ``rq suspend`` keeps all workers from taking jobs. Redis is asked at most once a second."""
        if system.monotonic() - self._suspension_seen > _SUSPENSION_SECONDS:
            before, self._suspended = self._suspended, self.store.suspended()
            self._suspension_seen = system.monotonic()
            if self._suspended != before:
                logger.info("takes no jobs: rq suspend" if self._suspended else "takes jobs again: rq resume")
        return self._suspended

    def take_name(self, device: str) -> None:
        """If RQ has made up this worker's name, replace it by a name with host, accelerator and process."""
        if not _MADE_UP.fullmatch(self.name):
            return
        name = first = worker_name(device, str(os.getpid()))
        number = 1
        # a worker in an earlier container may have had this name
        while self.connection.exists(self.redis_worker_namespace_prefix + name):
            number += 1
            name = f"{first}.{number}"
        self.name = name

    def claim(self, job: ScoringJob, queue: OrderedQueue) -> HeldJob | None:
        """Claim a job for this worker and begin it, in one step.

        Returns ``None`` if the job is gone or over, or another worker has it.
        """
        with self.connection.pipeline() as pipe:
            execution = Execution.create(job, self.lease_seconds, pipeline=pipe, worker_name=self.name)
            self.executions[execution.id] = execution
            self.set_state(WorkerStatus.BUSY, pipeline=pipe)
            self.heartbeat(pipeline=pipe)  # if the worker dies now, it is still listed for some minutes
            job.begin(execution, queue, pipe)
            *_, is_begun = pipe.execute()
            if not is_begun:
                self.cleanup_execution(job, pipe, execution)
                pipe.execute()
        return HeldJob(self, job, queue, execution) if is_begun else None

    def forget(self, job: ScoringJob) -> None:
        # a copy, because two threads begin and end executions
        executions = list(self.executions.values())
        with self.connection.pipeline() as pipe:
            for execution in executions:
                if execution.job_id == job.id:
                    self.cleanup_execution(job, pipe, execution)
            pipe.execute(raise_on_error=False)  # the execution's keys may be damaged, too

    def write_record(self) -> None:
        """Write RQ's record of this worker again, in case it is lost or overwritten."""
        connection: Any = self.connection
        try:
            connection.hset(self.key, mapping=self.serialize())
        except redis.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            connection.delete(self.key)
            connection.hset(self.key, mapping=self.serialize())
        worker_registration.register(self)

    def renew_leases(self) -> None:
        """Renew the worker's record and the leases of its jobs, even if Redis refuses some."""
        self.heartbeat()
        for execution in list(self.executions.values()):
            try:
                self.maintain_heartbeats(execution.job, execution)
            except redis.ResponseError as error:
                logger.warning("the lease of job %s cannot be renewed: %s", execution.job_id, error)

    def show_state(self, *, busy: bool) -> None:
        idle = WorkerStatus.SUSPENDED if self.suspended else WorkerStatus.IDLE
        state = WorkerStatus.BUSY if busy else idle
        if self.get_state() != state:
            with suppress(redis.ResponseError):  # the record is damaged; the heartbeat writes it again
                self.set_state(state)

    # Methods that RQ calls.

    @property
    def dequeue_timeout(self) -> int:
        """Longest silence in seconds that RQ expects of a connection. After ten more seconds, the connection
        counts as dead.
        """
        return POLL_SECONDS

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: DequeueStrategy = DequeueStrategy.DEFAULT,
    ) -> bool:
        """Call `run` instead of RQ's own loop, which would end at the first error.

        RQ's scheduler is not started: the heartbeat of any worker enqueues the jobs that are due.
        """
        self._dequeue_strategy = dequeue_strategy
        log = logging_level, date_format, log_format
        return self.run(WorkOptions(burst, *log, max_jobs, max_idle_time))

    def request_stop(self, signum: Any, frame: Any) -> None:
        self.signalled(1)
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]
        self.interrupt()

    def request_force_stop(self, signum: int, frame: Any) -> None:
        self.signalled(2)
        super().request_force_stop(signum, frame)

    def _shutdown(self) -> None:
        self._stop_requested = True

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds that the lease of a job lasts; the heartbeat thread renews the lease."""
        return self.lease_seconds

    def serialize(self) -> dict[str, Any]:
        return {**super().serialize(), SCORING_FIELD: 1}

    def register_birth(self) -> None:
        """Register as RQ does, and announce that this worker is a ScoringWorker.

        Raises
        ------
        ConfigError
            Another worker has this worker's name.
        """
        self._await_name()
        try:
            super().register_birth()  # type: ignore[no-untyped-call]
        except ValueError:
            raise self._name_in_use() from None
        self.announce()

    def _await_name(self) -> None:
        """Wait until a killed worker with this name counts as dead, and delete its record.

        In Redis, the report of a killed worker is no longer renewed, and expires. If the report is renewed or
        never expires, a running worker has the name, and a `ConfigError` is raised.
        """
        connection: Any = self.connection
        before = math.inf
        while (remaining := connection.pttl(keys.worker(self.name))) != _NO_KEY:
            if remaining > before or remaining == _NO_EXPIRY:
                raise self._name_in_use()
            if before == math.inf:
                seconds = remaining / 1000
                logger.info("waiting until the worker that had this name counts as dead: %.0f s", seconds)
            if self.stopping:
                raise SystemExit(0)
            before = remaining
            system.sleep(_NAME_SECONDS)
        if connection.hexists(self.key, SCORING_FIELD):
            connection.delete(self.key)

    def _name_in_use(self) -> ConfigError:
        return ConfigError(f"a worker named {self.name!r} is running: give each worker a --name of its own")

    def register_death(self) -> None:
        self.connection.delete(keys.worker(self.name))
        try:
            super().register_death()  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            logger.warning("Redis refuses a part of the worker's end: %s", error)

    def unsubscribe(self) -> None:
        """Unsubscribe from RQ's commands, but first stop the thread that listens to them.

        RQ's own order would leave the thread waiting for one more message.
        """
        if self.pubsub_thread:
            self.pubsub_thread.stop()
        super().unsubscribe()  # type: ignore[no-untyped-call]

    def handle_execution_ended(self, job: Job, queue: Queue, heartbeat_ttl: int) -> None:
        """Record a job's end as RQ does, but without the job's last heartbeat, which would write to a job
        that is gone.
        """
        job.ended_at = now()
