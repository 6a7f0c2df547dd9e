"""A worker's heartbeat: keeps its claimed jobs its own, and hands on those of workers that have died."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import redis
from rq import worker_registration
from rq.worker.base import BaseWorker

from jobs.recovery import FailureHandler, clean_queue
from jobs.worker_report import WorkerReport, announce_worker

logger = logging.getLogger(__name__)


class Heartbeat:
    """Beats from a thread that no forward can block.

    Parameters
    ----------
    worker
        Whose jobs to keep.
    seconds
        From one beat to the next.
    lease_seconds
        A job whose worker has not beaten for this long counts as abandoned and runs elsewhere.
    report
        What to announce of it.
    wedged
        Says whether the forward hangs for good.
    handle_failure
        Tells runs of jobs that are given up.
    on_beat
        Called with each beat.
    """

    def __init__(
        self,
        worker: BaseWorker,
        seconds: float,
        lease_seconds: int,
        report: Callable[[], WorkerReport],
        wedged: Callable[[], bool],
        handle_failure: FailureHandler,
        on_beat: Callable[[], None],
    ) -> None:
        self.lease_seconds = lease_seconds
        self._worker = worker
        self._seconds = seconds
        self._report = report
        self._wedged = wedged
        self._on_beat = on_beat
        self._handle_failure = handle_failure
        self._last = time.monotonic()
        self._clean_from = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def announce(self) -> None:
        """Say that the worker is there."""
        # Again: the server may have lost its data.
        self._worker.connection.hset(self._worker.key, mapping=self._worker.serialize())
        worker_registration.register(self._worker)
        announce_worker(self._worker.connection, self._worker.name, self._report(), self.lease_seconds)

    def age(self) -> float:
        """Seconds since the last beat that went through."""
        return time.monotonic() - self._last

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._end_if_wedged()
            for step in (self._beat, self._clean_queues, self._on_beat):
                try:
                    step()
                except Exception:  # whatever it is, the jobs that run must not be taken for dead
                    logger.exception("heartbeat failed, trying again")

    def _beat(self) -> None:
        self.announce()
        self._worker.heartbeat()
        for execution in list(self._worker.executions.values()):
            try:
                self._worker.maintain_heartbeats(execution.job, execution)
            except redis.ResponseError as error:
                logger.warning("the lease of job %s cannot be renewed: %s", execution.job_id, error)
        if self.age() > 2 * self._seconds:  # Redis was away, and others have yet to renew their leases
            self._clean_from = time.monotonic() + self.lease_seconds
        self._last = time.monotonic()

    def _end_if_wedged(self) -> None:
        """A forward that never ends would hold its jobs for ever: its leases must lapse."""
        if self._wedged():
            logger.critical("a batch takes far too long, ending")
            os._exit(1)

    def _clean_queues(self) -> None:
        """Hand on the jobs of dead workers, one worker at a time."""
        worker, lock_ms = self._worker, int(self._seconds * 1000)
        if time.monotonic() < self._clean_from:
            return
        for queue in worker.queues:
            # RQ's own lock lasts 15 minutes and would outlive a worker killed in here.
            if worker.connection.set(queue.registry_cleaning_key, os.getpid(), nx=True, px=lock_ms):
                clean_queue(queue, self._handle_failure, self.lease_seconds)
