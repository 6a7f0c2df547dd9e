"""Takes jobs from the queues for a worker, waits for jobs, and gives jobs to idle workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.protocol.ordered_queue import OrderedQueue, Taken, is_bulk_job
from rankmill.jobs.protocol.set_aside import DamagedJob, read_job, set_aside
from rankmill.jobs.runtime.patience import blocking, waiting
from rankmill.jobs.system import system
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.host import metrics
from rankmill.workers.queue.claim_order import ClaimOrder, Refusals, chunks_to_give
from rankmill.workers.queue.claims import Claims
from rankmill.workers.rq.job import ScoringJob
from rankmill.workers.rq.worker import POLL_SECONDS, RQWorker

_LOOK_AGAIN_SECONDS = 0.1
"""A worker that refuses some runs does not wait for a job, but asks the queues again after this many seconds.
Waiting at RQ's list could give it a job of those runs.
"""

_LISTEN_SECONDS = 1

_RING_SECONDS = 60
"""A ring of the `Bell`, which wakes a worker for a request, expires after this many seconds."""

Found = tuple[bytes, OrderedQueue]
"""The id of a job that was taken from its queue, and the queue."""


class Bell:
    """Wakes a busy worker when a request comes. A thread waits for requests between `listen` and `pause`.

    A worker that is full of bulk work cannot wait at the queue, because it would get more bulk work. Each
    chunk of a request rings the bell once, which wakes one listening worker. A ring that is heard after
    `pause` is passed on to the next worker.

    Parameters
    ----------
    queues
        The worker's queues.
    rung
        Called from the thread when a request has come.
    """

    def __init__(self, queues: Sequence[OrderedQueue], rung: Callable[[], None]) -> None:
        self._connection: Any = queues[0].connection
        self._keys = [keys.bell(queue.name) for queue in queues]
        self._rung = rung
        self._listening = system.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        if self._thread is None:
            self._thread = system.Thread(target=self._run, name="bell", daemon=True)
            self._thread.start()
        self._listening.set()

    def pause(self) -> None:
        self._listening.clear()

    def _run(self) -> None:
        while self._listening.wait():
            try:
                with waiting(most=0):
                    ring = self._connection.blpop(self._keys, _LISTEN_SECONDS)
                    if ring and self._listening.is_set():
                        self._rung()
                    elif ring:
                        self._pass_on(ring[0])
            except (redis.RedisError, RedisUnavailable):  # the main thread's commands report errors of Redis
                system.sleep(_LISTEN_SECONDS)

    def _pass_on(self, key: bytes) -> None:
        with self._connection.pipeline() as pipe:
            pipe.lpush(key, 1)
            pipe.expire(key, _RING_SECONDS)
            pipe.execute()


class Intake:
    """Claims jobs from a worker's queues, in the order of `ClaimOrder`."""

    def __init__(
        self, worker: RQWorker, claims: Claims, pipeline: Pipeline, order: ClaimOrder, refusals: Refusals
    ) -> None:
        self._worker = worker
        self._claims = claims
        self._pipeline = pipeline
        self._order = order
        self._refusals = refusals
        self._bell = Bell(self._queues, pipeline.wake)
        self._room: list[Priority] = []
        """The priorities (``request``, ``bulk``) whose jobs the worker could claim when it last tried, the
        first choice first.
        """

    @property
    def full(self) -> bool:
        """Whether the worker already had enough requests or enough bulk work when it last tried to claim a
        job.
        """
        return len(self._room) < 2

    @property
    def _queues(self) -> list[OrderedQueue]:
        return self._worker.queues_in_turn

    def claim_next(self, *, wait: bool) -> bool:
        """Claim the next job, and return whether a job was claimed.

        With `wait`, a worker that may claim requests and bulk work waits up to `POLL_SECONDS` for a job.
        """
        claimed = self._find(wait)
        if claimed is None:
            return False
        job, queue = claimed
        self._worker.reorder_queues(queue)
        self._claims.take(job, queue)
        return True

    def _find(self, wait: bool) -> tuple[ScoringJob, OrderedQueue] | None:
        self._room = kinds = self._kinds()
        willing = not (self._refusals.reasons() or self._order.left_alone)
        waits = wait and not self.full
        claimed = self._readable(lambda: self._take(kinds, willing, waits and willing)) if kinds else None
        if claimed is not None or not waits:
            return claimed
        if not willing:
            system.sleep(_LOOK_AGAIN_SECONDS)
            return None
        return self._readable(self._wait_for_any)

    def _kinds(self) -> list[Priority]:
        requests, bulk = (self._pipeline.pending_of(priority) for priority in ("request", "bulk"))
        return self._order.kinds(requests, bulk, hungry=self._pipeline.hungry)

    def _readable(self, take: Callable[[], Found | None]) -> tuple[ScoringJob, OrderedQueue] | None:
        while not self._worker.stopping:
            taken = take()
            if taken is None:
                return None
            raw_id, queue = taken
            try:
                job = read_job(queue, raw_id)
            except DamagedJob as error:
                set_aside(queue, raw_id, str(error))
                metrics.set_aside.inc()
                continue
            if job is not None and job.id not in self._claims.unanswered:  # a queue may contain an id twice
                return cast("ScoringJob", job), queue
            cast("Any", queue.connection).lrem(queue.intermediate_queue_key, 1, raw_id)
        return None

    def _take(self, kinds: list[Priority], willing: bool, waits: bool) -> Found | None:
        """Take a job of one of the priorities `kinds` from the queues, or else give jobs to idle workers.

        Chunks of refused runs are left to other workers (`ClaimOrder.left_alone` and
        `ClaimOrder.refused_lately`).
        """
        alone, lately = self._order.left_alone, self._order.refused_lately
        for runs in (lately, alone) if lately != alone else (alone,):
            seen = self._look(kinds, willing, waits, runs)
            queue, taken = seen[-1]
            if taken.job_id:
                break
        self._order.saw(sum(reply.waiting for _, reply in seen), max(reply.workers for _, reply in seen))
        if kinds[0] == "bulk" and not (taken.job_id and is_bulk_job(taken.job_id)):
            self._order.no_bulk_waits()
        if taken.job_id:
            return taken.job_id, queue
        for queue, taken in seen:
            if taken.idle and not taken.waiting and self._claims.unanswered:
                self._give(queue, taken.idle)
        return None

    def _look(
        self, kinds: list[Priority], willing: bool, waits: bool, alone: list[str]
    ) -> list[tuple[OrderedQueue, Taken]]:
        """Ask one queue after another until one gives a job, and return each asked queue with its reply."""
        idle = willing and not self._claims.unanswered
        seen: list[tuple[OrderedQueue, Taken]] = []
        for queue in self._queues:
            taken = queue.take(kinds, worker=self._worker.name, waits=waits, idle=idle, alone=alone)
            seen.append((queue, taken))
            if taken.job_id:
                break
        return seen

    def _wait_for_any(self) -> Found | None:
        """Wait up to `POLL_SECONDS` for a job at RQ's lists, and take it.

        If the worker has one queue, the job's id moves to that queue's intermediate list. Redis has no such
        command for several queues.
        """
        queues, connection = self._queues, cast("Any", self._worker.connection)
        if len(queues) == 1:
            (queue,) = queues
            raw_id = blocking(
                lambda: connection.blmove(queue.key, queue.intermediate_queue_key, POLL_SECONDS)
            )
            return None if raw_id is None else (raw_id, queue)
        by_key = {queue.key.encode(): queue for queue in queues}
        popped = blocking(lambda: connection.blpop(list(by_key), POLL_SECONDS))
        return None if popped is None else (popped[1], by_key[popped[0]])

    def _give(self, queue: OrderedQueue, idle: int) -> None:
        claims = [claim for claim in self._claims.unstarted() if claim.queue == queue]
        pairs = [len(claim.work.rows) for claim in claims if claim.work]
        most = chunks_to_give(pairs, self._pipeline.pending, idle)
        if most:
            most = queue.claim_idle(most)
        for claim in claims[::-1][:most]:
            self._claims.withdraw(claim)

    def wait_for_room(self) -> None:
        """Wait up to `POLL_SECONDS` until the worker may claim more, or a request comes that it may claim."""
        if "request" in self._room:
            self._bell.listen()
        self._pipeline.wait_for(lambda: len(self._kinds()) > len(self._room), POLL_SECONDS)
        self._bell.pause()
