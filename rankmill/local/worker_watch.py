"""Keeping an eye on the workers while a file is scored."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import redis

from jobs.errors import InputError, RedisUnavailable
from jobs.job import worker_command, wrong_worker_message
from jobs.runtime.passwords import mask_passwords
from jobs.runtime.patience import waiting
from jobs.worker_report import queue_workers
from rankmill.local.embedded import EmbeddedCluster

_LOOK_SECONDS = 1.0

_REMIND_SECONDS = 30.0
"""How often to say that nobody listens."""

logger = logging.getLogger(__name__)


class WorkerWatch:
    """Counts the live workers of a queue and says plainly when there are none.

    Parameters
    ----------
    client
        The server.
    queue
        The queue to watch.
    cluster
        Where the workers are embedded ones: what keeps them alive.
    """

    def __init__(self, client: redis.Redis, queue: str, cluster: EmbeddedCluster | None) -> None:
        self._client = client
        self._queue = queue
        self._cluster = cluster
        self._first_worker: float | None = None
        self._looked = 0.0
        self._reminded = 0.0
        self.workers = 0

    def check_queue(self) -> None:
        """Look before any work; raises `InputError` if the queue has only workers of another kind."""
        if self._cluster:
            return
        found = queue_workers(self._client, self._queue)
        if found.other and not found.scoring:
            raise InputError(wrong_worker_message(self._queue))
        self._note(len(found.scoring))

    def look(self) -> None:
        """Look again if it is time to; raises `EmbeddedError` when the embedded workers are lost."""
        if self._cluster:
            self._cluster.check()
        if time.monotonic() - self._looked < _LOOK_SECONDS and self._first_worker is not None:
            return
        with suppress(RedisUnavailable), waiting(most=0):  # those who need the server wait for it
            self._note(len(queue_workers(self._client, self._queue).scoring))

    def speed(self, rows: int) -> float:
        """Rows a second since there was a worker."""
        if self._first_worker is None:
            return 0.0
        return max(rows, 0) / max(time.monotonic() - self._first_worker, 1e-9)

    def since(self, started: float) -> float:
        """Seconds from `started` until there was a worker; 0 if there never was one."""
        return self._first_worker - started if self._first_worker is not None else 0.0

    def _note(self, workers: int) -> None:
        now = time.monotonic()
        self._looked = now
        self.workers = workers
        if workers and self._first_worker is None:
            self._first_worker = now
        if not workers and not self._cluster and now - self._reminded > _REMIND_SECONDS:
            self._reminded = now
            logger.warning(
                "nobody listens on queue %r at %s yet; start a worker with: %s",
                self._queue,
                mask_passwords(_address(self._client)),
                worker_command(self._queue),
            )


def _address(client: redis.Redis) -> str:
    known = client.connection_pool.connection_kwargs
    return str(known.get("path") or f"{known.get('host')}:{known.get('port')}")
