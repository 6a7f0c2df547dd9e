"""RQ's worker with records in Redis that a heartbeat thread renews: its own and those of its jobs."""

from __future__ import annotations

import math
import os
import re
import time
from typing import Any

from rq import Queue
from rq.executions import Execution
from rq.job import Job
from rq.utils import now
from rq.worker import SimpleWorker
from rq.worker.base import WorkerStatus

from rankmill.jobs.protocol.worker_report import SCORING_FIELD, TAKES_NEW_NAMES, withdraw_worker
from rankmill.jobs.runtime.hosts import worker_name
from rankmill.workers.queue.heartbeat import Heartbeat
from rankmill.workers.queue.rq_job import ScoringJob

_MADE_UP = re.compile("[0-9a-f]{32}")
"""What RQ calls a worker without ``--name``, also in a worker pool."""


_SUSPENSION_SECONDS = 1
"""Least time between two looks whether somebody has suspended all workers (``rq suspend``)."""


class LeasedWorker(SimpleWorker):
    """Keeps what Redis knows of the worker and its jobs; a record lasts for ``lease_seconds``."""

    _heartbeat: Heartbeat
    _suspension_seen = -math.inf

    def take_name(self, device: str) -> None:
        """Replace a name that RQ has made up by one that tells host, accelerator and process."""
        if not _MADE_UP.fullmatch(self.name):
            return
        name = first = worker_name(device, str(os.getpid()))
        number = 1
        while self.connection.exists(self.redis_worker_namespace_prefix + name):  # of a container before
            number += 1
            name = f"{first}.{number}"
        self.name = name

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds that the lease of a job lasts; the heartbeat thread renews it."""
        return self._heartbeat.lease_seconds

    def serialize(self) -> dict[str, Any]:
        """RQ's record of this worker, marked as a ScoringWorker even after the worker is gone."""
        return {**super().serialize(), SCORING_FIELD: TAKES_NEW_NAMES}

    def register_birth(self) -> None:
        """Also announce that this worker is a ScoringWorker."""
        super().register_birth()  # type: ignore[no-untyped-call]
        self._heartbeat.announce()

    def register_death(self) -> None:
        """Also withdraw what `register_birth` announced."""
        withdraw_worker(self.connection, self.name)
        super().register_death()  # type: ignore[no-untyped-call]

    def unsubscribe(self) -> None:
        """As RQ does, but tell the thread to end before its last message: it would wait for another one."""
        if self.pubsub_thread:
            self.pubsub_thread.stop()
        super().unsubscribe()  # type: ignore[no-untyped-call]

    def prepare_execution(self, job: Job) -> Execution:
        """What RQ does in two steps, in one; but keep the job's expiry, which RQ would remove."""
        assert isinstance(job, ScoringJob)
        lease = self._heartbeat.lease_seconds
        with self.connection.pipeline() as pipe:
            execution = Execution.create(job, lease, pipeline=pipe, worker_name=self.name)
            self.executions[execution.id] = execution
            self.set_state(WorkerStatus.BUSY, pipeline=pipe)
            self.heartbeat(pipeline=pipe)  # a worker that dies is listed as lost for some minutes
            job.heartbeat(now(), lease, pipeline=pipe)
            job.prepare_for_execution(self.name, pipeline=pipe)
            pipe.expire(job.key, job.run_ttl)
            pipe.lrem(Queue(job.origin, connection=self.connection).intermediate_queue_key, 1, job.id)
            pipe.execute()
        return execution

    def check_for_suspension(self, burst: bool) -> None:
        """As RQ does, at most once a second."""
        if time.monotonic() - self._suspension_seen > _SUSPENSION_SECONDS:
            super().check_for_suspension(burst)
            self._suspension_seen = time.monotonic()

    def handle_execution_ended(self, job: Job, queue: Queue, heartbeat_ttl: int) -> None:
        """As RQ does, but send no last heartbeat: that would recreate part of a job gone from Redis."""
        job.ended_at = now()

    def run_maintenance_tasks(self) -> None:
        """Do nothing: the heartbeat thread cleans the queues, also while a job runs."""
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ declares it None

    def show_state(self, *, busy: bool) -> None:
        """Tell `rq info` whether this worker is busy."""
        state = WorkerStatus.BUSY if busy else WorkerStatus.IDLE
        if self.get_state() != state:
            self.set_state(state)
