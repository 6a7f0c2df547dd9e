"""How jobs get from the queues to a worker: which it takes, how it waits, what it gives to idle workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import redis
from rq import Queue

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.protocol.ordered_queue import OrderedQueue, Taken, is_bulk_job
from rankmill.jobs.runtime.patience import waiting
from rankmill.workers.queue.claim_order import ClaimOrder, chunks_to_give
from rankmill.workers.queue.claims import Claims
from rankmill.workers.queue.rq_job import ScoringJob, pop, take_job

if TYPE_CHECKING:
    from rankmill.jobs.contract.priority import Priority
    from rankmill.workers.engine.pipeline import Pipeline

POLL_SECONDS = 1
"""Longest wait for a job or for room, until the worker checks whether it must stop."""

_LISTEN_SECONDS = 1
"""How long one command listens to the bell."""


class Bell:
    """Listens in a thread, and only while it is told to.

    A worker takes any job by waiting for it at the queue; one that is full of bulk work cannot, as it
    would get bulk work. Each request rings once, so it wakes one such worker.

    Parameters
    ----------
    queues
        The worker's queues.
    rung
        Called, from the thread, when a request has come.
    """

    def __init__(self, queues: Sequence[Queue], rung: Callable[[], None]) -> None:
        self._connection: Any = queues[0].connection
        self._keys = [keys.bell(queue.name) for queue in queues]
        self._rung = rung
        self._listening = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Begin to listen."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bell", daemon=True)
            self._thread.start()
        self._listening.set()

    def pause(self) -> None:
        """Listen no more, from the next second on."""
        self._listening.clear()

    def _run(self) -> None:
        while self._listening.wait():
            try:
                with waiting(most=0):
                    rings = self._connection.blpop(self._keys, _LISTEN_SECONDS)
                if rings:
                    self._rung()
            except (
                redis.RedisError,
                RedisUnavailable,
            ):  # the worker's own commands say so; it also looks every second
                time.sleep(_LISTEN_SECONDS)


class Intake:
    """Takes jobs off the queues, in the order of `ClaimOrder`.

    Parameters
    ----------
    name
        Name of the RQ worker.
    queues
        Returns the worker's queues in order of preference, which may change.
    claims, pipeline, order
        The worker's claims, its pipeline, and the rules.
    stopped
        Returns whether to take no more jobs.
    """

    def __init__(
        self,
        name: str,
        queues: Callable[[], list[Queue]],
        claims: Claims,
        pipeline: Pipeline,
        order: ClaimOrder,
        stopped: Callable[[], bool],
    ) -> None:
        self._name = name
        self._queues = cast("Callable[[], list[OrderedQueue]]", queues)
        self._claims = claims
        self._pipeline = pipeline
        self._order = order
        self._stopped = stopped
        self._bell = Bell(self._queues(), pipeline.wake)
        self.full = False
        """Whether the last `next` had no room for some jobs, so that jobs may still wait."""

    def next(self, *, wait: bool) -> tuple[ScoringJob, OrderedQueue] | None:
        """Take the next job; without one, wait up to `POLL_SECONDS` for one, or for room, if `wait`."""
        kinds = self._kinds()
        self.full = len(kinds) < 2
        found = take_job(lambda: self._take(kinds), self._claims.held, self._stopped) if kinds else None
        if found:
            return found
        if self.full:
            self._wait_for_room(kinds)
            return None
        if not wait:
            return None
        return take_job(lambda: pop(self._queues(), POLL_SECONDS), self._claims.held, self._stopped)

    def _kinds(self) -> list[Priority]:
        requests, bulk = (self._pipeline.pending_of(each) for each in ("request", "bulk"))
        return self._order.kinds(requests, bulk, hungry=self._pipeline.hungry)

    def _take(self, kinds: list[Priority]) -> tuple[bytes, OrderedQueue] | None:
        """Take a job of one of `kinds`; while none waits, give some to idle workers."""
        willing = not self._claims.scorer.refusals.reasons()
        idle = willing and not self._claims.held
        seen: list[tuple[OrderedQueue, Taken]] = []
        for queue in self._queues():
            taken = queue.take(
                kinds, self._order.runs, worker=self._name, idle=idle, bring=willing,
                further=self._order.further(queue.name),
            )  # fmt: skip
            seen.append((queue, taken))
            if taken.job_id:
                break
        waiting = {queue.name: each.waiting for queue, each in seen}
        self._order.saw(waiting, max(each.workers for _, each in seen))
        queue, taken = seen[-1]
        if kinds[0] == "bulk" and not (taken.job_id and is_bulk_job(taken.job_id)):
            self._order.no_bulk_waits()
        if taken.job_id:
            return taken.job_id, queue
        for queue, taken in seen:
            if taken.idle and not taken.waiting and self._claims.held:
                self._give(queue, taken.idle)
        return None

    def _give(self, queue: OrderedQueue, idle: int) -> None:
        """Give unstarted chunks to up to `idle` workers of a queue that have none."""
        claims = self._claims.unstarted(queue)
        pairs = [len(claim.work.rows) for claim in claims if claim.work]
        most = chunks_to_give(pairs, self._pipeline.pending, idle)
        if most:
            most = queue.claim_idle(most)
        for claim in claims[::-1][:most]:
            if claim.work and self._pipeline.withdraw(claim.work):
                self._claims.hand_back(claim.job.id)

    def _wait_for_room(self, kinds: list[Priority]) -> None:
        """Wait for room for more kinds of jobs than these, or for a request if there is room for one."""
        if "request" in kinds:
            self._bell.listen()
        self._pipeline.wait_for(lambda: len(self._kinds()) > len(kinds), POLL_SECONDS)
        self._bell.pause()
