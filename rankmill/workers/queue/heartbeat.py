"""Renews a worker's leases, recovers the jobs of dead workers, and reports the worker's state."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import redis

from rankmill.jobs.protocol.leases import OURS, RQ_DELAY, Renewals, server_time
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.orders import ask_for_orders
from rankmill.jobs.protocol.queues import use_queues, write_capacity
from rankmill.jobs.protocol.recovery import clean_queue, failure_handler
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.system import Periodic, system
from rankmill.workers.queue.orders import Orders
from rankmill.workers.rq.worker import RQWorker

logger = logging.getLogger(__name__)


class WorkerHeartbeat(Periodic):
    """Sends heartbeats from a thread that no forward can block.

    Parameters
    ----------
    worker
        The worker whose leases are renewed.
    seconds
        Seconds between two heartbeats.
    report
        Returns the report that each heartbeat writes.
    wedged
        Returns whether a forward, a load or a tokenizer hangs and will never end.
    on_beat
        Called at each heartbeat.
    orders
        Receives the operators' orders to this worker, for example to drain it.
    """

    def __init__(
        self,
        worker: RQWorker,
        seconds: float,
        report: Callable[[], WorkerReport],
        wedged: Callable[[], bool],
        on_beat: Callable[[], None],
        orders: Orders,
    ) -> None:
        self._worker = worker
        self._lock_ms = int(seconds * 800)  # the lock ends before its owner's next heartbeat
        self._report = report
        self._wedged = wedged
        self._on_beat = on_beat
        self._handle_failure = failure_handler(worker.store)
        self._orders = orders
        retry: Any = worker.connection.get_retry()
        self._renewals = Renewals(seconds, worker.lease_seconds, after_outage=retry.has_waited)
        self._server_now = 0.0  # the server's time at the last renewal
        super().__init__("heartbeat", self._take_steps, seconds, orders.news)

    def announce(self) -> None:
        self._worker.write_record()
        self._report_state()

    def age(self) -> float:
        return self._renewals.age

    def _take_steps(self) -> None:
        self._end_if_wedged()
        for step in (
            self._worker.write_record,
            self._beat,
            self._report_state,
            self._clean_queues,
            self._sum_up,
            self._on_beat,
        ):
            try:
                step()
            except redis.ResponseError as error:  # for instance, a key has the wrong type
                _tell_refused(error)
            except Exception:  # whatever fails, the leases of running jobs must be renewed
                logger.exception("heartbeat failed, trying again")

    def _report_state(self) -> None:
        """Write the worker's report to Redis, and read operators' orders to the worker, in one round trip."""
        worker = self._worker
        with worker.connection.pipeline() as pipe:
            announce_worker(pipe, worker.name, self._report(), worker.lease_seconds)
            use_queues(pipe, worker.queue_names())
            ask_for_orders(pipe, worker.name, self._orders.known)
            replies = pipe.execute(raise_on_error=False)
        if not isinstance(replies[-1], Exception):
            self._orders.deliver(replies[-1])
        if refused := [reply for reply in replies if isinstance(reply, Exception)]:
            _tell_refused(refused[0])

    def _beat(self) -> None:
        self._worker.renew_leases()
        self._server_now = server_time(self._worker.connection)
        self._renewals.renewed(self._server_now)

    def _end_if_wedged(self) -> None:
        """End the worker's process if a forward, a load or a tokenizer hangs, so that its leases end too."""
        if self._wedged():
            logger.critical("a batch, or a model's load, takes far too long; ending this worker")
            system.exit(1)

    def _sum_up(self) -> None:
        for queue in self._worker.queues:
            write_capacity(self._worker.connection, queue.name, self._worker.lease_seconds)

    def _clean_queues(self) -> None:
        """Recover the jobs of dead workers; a lock lets one worker do this at a time."""
        worker = self._worker
        for queue in worker.queues_in_turn:
            if self._lock(queue):
                trusts = self._renewals.others_have_lapsed
                seconds, now = worker.lease_seconds, self._server_now
                clean_queue(queue, self._handle_failure, seconds, now, trusts_leases=trusts)
                if trusts:
                    self._end_lock_with_a_lease(queue)
                else:
                    # This worker does not know yet whether a lapsed lease means a dead worker. Free the lock
                    # for another worker, which may know it.
                    worker.connection.delete(queue.registry_cleaning_key)

    def _lock(self, queue: OrderedQueue) -> bool:
        """Take the lock for cleaning a queue, and return whether this worker has it now.

        If another process holds the lock, and the lock lasts longer than a new one would, this worker takes
        the lock nevertheless. Such a lock is one of RQ's own code, which lasts 15 minutes even if its process
        dies.
        """
        connection: Any = self._worker.connection
        lock, mine = queue.registry_cleaning_key, {"value": os.getpid(), "px": self._lock_ms}
        if connection.set(lock, nx=True, **mine):
            return True
        return bool(connection.pttl(lock) > self._lock_ms and connection.set(lock, **mine))

    def _end_lock_with_a_lease(self, queue: OrderedQueue) -> None:
        """If a job's lease lapses before the lock for cleaning its queue ends, let the lock end at that time.
        Then any worker can recover the job. Leases of plain RQ workers are not looked at.
        """
        connection: Any = self._worker.connection
        leases, first = queue.started_job_registry.key, self._server_now + OURS
        for _, ends in connection.zrangebyscore(leases, first, "+inf", 0, 1, withscores=True):
            lease_ms = int(1000 * (ends - RQ_DELAY - self._server_now)) + 1
            if lease_ms < self._lock_ms:
                connection.set(queue.registry_cleaning_key, os.getpid(), px=max(lease_ms, 1), xx=True)


def _tell_refused(error: Exception) -> None:
    logger.warning("Redis refuses a part of the heartbeat: %s", error)
