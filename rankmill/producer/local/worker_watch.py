"""Watches the workers of a queue while a run is scored."""

from __future__ import annotations

from contextlib import suppress

import redis

from rankmill.jobs.contract.errors import InputError, RedisUnavailable
from rankmill.jobs.contract.job import wrong_worker_message
from rankmill.jobs.protocol.worker_report import Doing, queue_workers, worker_doings
from rankmill.jobs.runtime.connection import refuses_writes
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.system import system
from rankmill.producer.local.embedded import EmbeddedCluster

_STEPS: tuple[Doing, ...] = ("proving", "loading")
"""Steps of a worker before its first scores. If workers are at different steps, the first one of these is
shown.
"""

_LOOK_SECONDS = 1.0


class WorkerWatch:
    """Counts the live workers of a queue, and tells what they do before the first scores.

    Parameters
    ----------
    client
        A client of the server.
    queue
        The queue to watch.
    cluster
        The embedded cluster, if the workers are embedded.
    """

    def __init__(self, client: redis.Redis, queue: str, cluster: EmbeddedCluster | None) -> None:
        self._client = client
        self._queue = queue
        self._cluster = cluster
        self._first_worker: float | None = None
        self._looked = self._doing_until = 0.0
        self._doing = ""
        self._names: frozenset[str] = frozenset()

    @property
    def workers(self) -> int:
        return len(self._names)

    def check_queue(self) -> None:
        """Count the queue's workers before a run begins. Raises `InputError` if the queue has workers, but
        none of them is a ScoringWorker. An embedded cluster is not checked.
        """
        if self._cluster:
            return
        workers = queue_workers(self._client, self._queue)
        if workers.only_plain:
            raise InputError(wrong_worker_message(self._queue))
        self._note(workers.scoring)

    def look(self) -> None:
        """Count the workers, at most once a second after the first worker was seen. Raises `EmbeddedError` if
        the embedded cluster has failed.
        """
        if self._cluster:
            self._cluster.check()
        if system.monotonic() - self._looked < _LOOK_SECONDS and self._first_worker is not None:
            return
        with suppress(RedisUnavailable), waiting(most=0):  # if the server is away, count later
            workers = queue_workers(self._client, self._queue).scoring
            # a server that takes no writes takes no heartbeats, so workers that live are not listed any more
            if workers or self._first_worker is None or not refuses_writes(self._client):
                self._note(workers)

    def doing(self) -> str:
        """Return, in words, what the workers do before their first scores. The workers' reports are read from
        Redis at most once a second.
        """
        if not self._names:
            return "starting the worker" if self._cluster else "waiting for a worker"
        if system.monotonic() > self._doing_until:
            self._doing_until = system.monotonic() + _LOOK_SECONDS
            with suppress(RedisUnavailable), waiting(most=0):
                doings = worker_doings(self._client, self._names)
                steps = [doings[step] for step in _STEPS if step in doings]
                self._doing = steps[0] if steps else "waiting for the first scores"
        return self._doing

    def since(self, started: float) -> float:
        """Seconds from `started` until the first worker was seen; 0 if none has been seen."""
        return self._first_worker - started if self._first_worker is not None else 0.0

    def _note(self, workers: frozenset[str]) -> None:
        self._looked, self._names = system.monotonic(), workers
        if workers and self._first_worker is None:
            self._first_worker = self._looked
