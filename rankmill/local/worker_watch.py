"""Watch the workers of a queue while a run is scored."""

from __future__ import annotations

import logging
import shlex
import time
from contextlib import suppress

import redis

from jobs.errors import InputError, RedisUnavailable
from jobs.job import worker_command, wrong_worker_message
from jobs.runtime.passwords import mask_url
from jobs.runtime.patience import waiting
from jobs.store.worker_report import queue_workers
from rankmill.local.embedded import EmbeddedCluster

_LOOK_SECONDS = 1.0

_REMIND_SECONDS = 30.0
"""Seconds between two warnings that no worker listens."""

logger = logging.getLogger(__name__)


class WorkerWatch:
    """Counts the live workers of a queue, and logs a warning while there are none.

    Parameters
    ----------
    client
        The server.
    queue
        The queue to watch.
    url
        The server's URL, for messages.
    cluster
        The embedded cluster, if the workers are embedded.
    """

    def __init__(self, client: redis.Redis, queue: str, url: str, cluster: EmbeddedCluster | None) -> None:
        self._client = client
        self._queue = queue
        self._url = url
        self._cluster = cluster
        self._first_worker: float | None = None
        self._looked = 0.0
        self._reminded = 0.0
        self.workers = 0

    def check_queue(self) -> None:
        """Check before any work; raises `InputError` if the queue has only workers that cannot score."""
        if self._cluster:
            return
        found = queue_workers(self._client, self._queue)
        if found.other and not found.scoring:
            raise InputError(wrong_worker_message(self._queue))
        self._note(len(found.scoring))

    def look(self) -> None:
        """Count the workers, at most once a second; raises `EmbeddedError` if the embedded cluster failed."""
        if self._cluster:
            self._cluster.check()
        if time.monotonic() - self._looked < _LOOK_SECONDS and self._first_worker is not None:
            return
        with suppress(RedisUnavailable), waiting(most=0):  # other commands wait for the server
            self._note(len(queue_workers(self._client, self._queue).scoring))

    def since(self, started: float) -> float:
        """Seconds from `started` until the first worker was seen; 0 if there was none."""
        return self._first_worker - started if self._first_worker is not None else 0.0

    def _note(self, workers: int) -> None:
        now = time.monotonic()
        self._looked = now
        self.workers = workers
        if workers and self._first_worker is None:
            self._first_worker = now
        if not workers and not self._cluster and now - self._reminded > _REMIND_SECONDS:
            self._reminded = now
            logger.warning("%s", no_workers_message(self._queue, self._url))


def no_workers_message(queue: str, url: str) -> str:
    """One line for a queue without workers: the server, and two commands that start workers."""
    server = shlex.quote(mask_url(url))
    return (
        f"no worker listens on queue {queue!r} at {server} yet; start workers with: "
        f"score-workers --redis {server} --queue {shlex.quote(queue)} "
        f"(or one worker with: {worker_command(shlex.quote(queue))} --url {server})"
    )
