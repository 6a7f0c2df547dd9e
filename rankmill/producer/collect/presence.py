"""Watches the workers of a queue, so that no caller of a run waits silently where there is none."""

from __future__ import annotations

import logging
import math
from contextlib import suppress

from rankmill.jobs.contract.errors import NoWorkers, RedisUnavailable, RunFailed
from rankmill.jobs.contract.job import RESUME, no_workers_message, wrong_worker_message
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import Doing, taking_workers, worker_doings
from rankmill.jobs.runtime.passwords import mask_url
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.system import system

_STEPS: tuple[Doing, ...] = ("proving", "loading")
"""Steps of a worker before its first scores. If several workers are at different steps, users see the step
that comes first in this list.
"""

_LOOK_SECONDS, _STARTING_SECONDS = 1.0, 0.1
"""A client asks Redis at most once in `_LOOK_SECONDS` whether the queue has workers, for all of its runs
together. While this process starts workers, the client asks at most once in `_STARTING_SECONDS`.
"""

_WORD_SECONDS = 5.0
_REMIND_SECONDS = 30.0
"""Two warnings about the workers are at least this many seconds apart. When the queue has been without a
worker for `_WORD_SECONDS`, the first warning comes.
"""

logger = logging.getLogger(__name__)


class WorkerPresence:
    """Counts the live workers of a queue, and checks that there are some while runs wait for results. All
    runs of a client share one object, which any thread may call.

    Parameters
    ----------
    store, url
        The store of runs in Redis, and the server's URL, which messages name.
    queue
        Name of the queue.
    seconds
        A wait ends with `NoWorkers` after this many seconds without a worker. With ``None``, no wait ends in
        this way, because workers are started when they are needed.
    """

    def __init__(self, store: RunStore, url: str, queue: str, seconds: float | None) -> None:
        self._store = store
        self._url = url
        self._queue = queue
        self._seconds = seconds
        self._looked = self._seen = self._warned = -math.inf
        self._looking = False
        self._names: frozenset[str] = frozenset()
        self._first_seen: float | None = None
        self._doing, self._doing_until = "", 0.0

    @property
    def workers(self) -> int:
        return len(self._names)

    def since(self, started: float) -> float:
        """Seconds from `started` until the first worker was seen; 0 if no worker has been seen."""
        return 0.0 if self._first_seen is None else self._first_seen - started

    def doing(self) -> str:
        """Return, in words, what the workers do before their first scores. The workers' reports are read from
        Redis at most once a second.
        """
        if not self._names:
            return "starting the worker" if self._seconds is None else "waiting for a worker"
        if system.monotonic() > self._doing_until:
            self._doing_until = system.monotonic() + _LOOK_SECONDS
            with suppress(RedisUnavailable), waiting(most=0):
                doings = worker_doings(self._store.redis, self._names)
                steps = [doings[step] for step in _STEPS if step in doings]
                self._doing = steps[0] if steps else "waiting for the first scores"
        return self._doing

    def check(self, since: float) -> None:
        """Check that the queue has workers. The run that needs them has waited for results since `since`
        (`time.monotonic` seconds). Redis is asked at most once a second.

        Raises
        ------
        NoWorkers
            No worker was seen for more than the allowed number of seconds.
        RunFailed
            Only plain RQ workers listen, which cannot score.
        """
        if self._seconds is None or self._looking:
            return
        self.look()
        missing = self._looked - max(self._seen, since)  # only the time until the last look at Redis counts
        if missing > self._seconds:
            raise NoWorkers(f"{no_workers_message(self._queue, mask_url(self._url))}; waited {missing:.0f} s")
        if missing > _WORD_SECONDS:
            self._warn(no_workers_message(self._queue, mask_url(self._url)))

    def look(self) -> None:
        """At most once a second, ask Redis which workers the queue has. If this process starts workers, but
        none was seen yet, ask more often. Raises `RunFailed` as `check` does.
        """
        unseen = system.monotonic() - self._looked
        starts = self._seconds is None and not self._names
        if self._looking or unseen <= (_STARTING_SECONDS if starts else _LOOK_SECONDS):
            return
        self._looking, self._looked = True, system.monotonic()
        # If the last look was long ago, the wait begins anew, because workers may have come and gone since.
        if unseen > _WORD_SECONDS:
            self._seen = self._looked
        try:
            self._look()
        finally:
            self._looking = False

    def _look(self) -> None:
        try:
            with waiting(most=0):
                workers = self._store.workers(self._queue)
                all_are_drained = workers.scoring and not (
                    self._store.capacity(self._queue).workers
                    or taking_workers(self._store.redis, workers.scoring)
                )
                suspended = self._store.suspended()
                refusal = None if workers.scoring else self._store.refusal()
        except RedisUnavailable:  # an outage does not count as time without workers
            self._seen = system.monotonic()
            return
        if workers.only_plain:
            raise RunFailed(wrong_worker_message(self._queue))
        if workers.scoring:
            self._seen, self._names = system.monotonic(), workers.scoring
            self._first_seen = self._first_seen or self._seen
            if all_are_drained:
                self._warn(
                    f"all workers of queue {self._queue!r} are drained and take no chunks; "
                    "rankmill workers resume NAME lets one take them"
                )
            elif suspended:
                self._warn(f"rq suspend was called, so no worker takes chunks; {RESUME}")
        elif refusal:
            self._seen = system.monotonic()
            self._warn(f"{refusal}; until it takes writes, workers cannot say that they listen")
        else:
            self._names = workers.scoring

    def _warn(self, message: str) -> None:
        now = system.monotonic()
        if now - self._warned > _REMIND_SECONDS:
            self._warned = now
            logger.warning("%s", message)
