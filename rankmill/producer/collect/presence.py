"""Checks whether a queue has workers that take chunks, so that no caller waits silently without workers."""

from __future__ import annotations

import logging
import math

from rankmill.jobs.contract.errors import NoWorkers, RedisUnavailable, RunFailed
from rankmill.jobs.contract.job import RESUME, no_workers_message, wrong_worker_message
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import taking_workers
from rankmill.jobs.runtime.passwords import mask_url
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.system import system

_LOOK_SECONDS = 1.0
"""All runs of a client together ask Redis at most once in this many seconds whether the queue has workers."""

_WORD_SECONDS = 5.0
_REMIND_SECONDS = 30.0
"""The first warning comes after `_WORD_SECONDS` without a worker. Two warnings are at least `_REMIND_SECONDS`
apart.
"""

logger = logging.getLogger(__name__)


class WorkerPresence:
    """Checks whether a queue has workers while runs wait for results. All runs of a client share one object,
    which any thread may call.

    Parameters
    ----------
    store, url
        The store of runs in Redis; and the URL of the Redis server, for messages.
    queue
        Name of the queue.
    seconds
        A wait ends with `NoWorkers` after this many seconds without a worker.
    """

    def __init__(self, store: RunStore, url: str, queue: str, seconds: float) -> None:
        self._store = store
        self._url = url
        self._queue = queue
        self._seconds = seconds
        self._looked = self._seen = self._warned = -math.inf
        self._looking = False

    def check(self, since: float) -> None:
        """Check that the queue has workers, for a run that has waited for results since `since`
        (`time.monotonic` seconds). Redis is asked at most once a second.

        Raises
        ------
        NoWorkers
            No worker was seen for more than the allowed number of seconds.
        RunFailed
            Only plain RQ workers listen, which cannot score.
        """
        if self._looking:
            return
        if (unseen := system.monotonic() - self._looked) > _LOOK_SECONDS:
            self._looking, self._looked = True, system.monotonic()
            # If the last check was long ago, the wait begins anew, because workers may have come and gone
            # since that check.
            if unseen > _WORD_SECONDS:
                self._seen = self._looked
            try:
                self._look(waited=self._looked - since)
            finally:
                self._looking = False
        missing = self._looked - max(self._seen, since)  # the time after the last check does not count
        if missing > self._seconds:
            raise NoWorkers(f"{no_workers_message(self._queue, mask_url(self._url))}; waited {missing:.0f} s")
        if missing > _WORD_SECONDS:
            self._warn(no_workers_message(self._queue, mask_url(self._url)))

    def _look(self, waited: float) -> None:
        try:
            with waiting(most=0):
                workers = self._store.workers(self._queue)
                all_are_drained = workers.scoring and not (
                    self._store.capacity(self._queue).workers
                    or taking_workers(self._store.redis, workers.scoring)
                )
                suspended = waited > _WORD_SECONDS and self._store.suspended()
        except RedisUnavailable:  # an outage does not count as time without workers
            self._seen = system.monotonic()
            return
        if workers.only_plain:
            raise RunFailed(wrong_worker_message(self._queue))
        if workers.scoring:
            self._seen = system.monotonic()
            if all_are_drained:
                self._warn(
                    f"all workers of queue {self._queue!r} are drained and take no chunks; "
                    "rankmill workers resume NAME lets one take them"
                )
            elif suspended:
                self._warn(f"rq suspend was called, so no worker takes chunks; {RESUME}")
        elif refusal := self._store.refusal():
            self._seen = system.monotonic()
            self._warn(f"{refusal}; until it takes writes, workers cannot say that they listen")

    def _warn(self, message: str) -> None:
        now = system.monotonic()
        if now - self._warned > _REMIND_SECONDS:
            self._warned = now
            logger.warning("%s", message)
