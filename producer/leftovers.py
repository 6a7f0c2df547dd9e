"""Runs that are over and that Redis is to forget: at once, or when it can serve again."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

from jobs.errors import RedisUnavailable
from jobs.run import Run
from jobs.runs import RunStore
from jobs.runtime.logs import about
from jobs.runtime.patience import redis_errors, waiting

_AT_ONCE_SECONDS = 1

logger = logging.getLogger(__name__)


class Leftovers:
    """Removes what runs have left in Redis; safe to share between threads.

    Whoever gives a run up does not wait for a server that cannot serve: a thread does, for as long as
    the run's keys would live.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._left: deque[tuple[Run, list[int], float]] = deque()
        self._busy = False

    def remove(self, run: Run, chunks: Iterable[int]) -> None:
        """Delete a run with its waiting jobs, those of `chunks`.

        Raises
        ------
        RedisFailed
            The server refuses it.
        """
        left = list(chunks)
        try:
            with redis_errors(), waiting(most=_AT_ONCE_SECONDS):
                self._store.delete(run, left)
        except RedisUnavailable as error:
            with about(run=run.id):
                logger.warning("what the run has left in Redis will be removed later: %s", error)
            self._later(run, left)

    def _later(self, run: Run, chunks: list[int]) -> None:
        with self._lock:
            self._left.append((run, chunks, time.monotonic() + run.ttl))
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._remove_all, name="leftovers", daemon=True).start()

    def _remove_all(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._busy = False
                    return
                run, chunks, until = self._left.popleft()
            try:
                with about(run=run.id), redis_errors():
                    self._store.delete(run, chunks)
            except RedisUnavailable:
                if time.monotonic() < until:
                    with self._lock:
                        self._left.append((run, chunks, until))
            except Exception:
                logger.exception("what run %s has left in Redis cannot be removed", run.id)
