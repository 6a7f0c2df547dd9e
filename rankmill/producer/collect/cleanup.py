"""Removes ended runs from Redis. If Redis cannot serve, a background thread removes the runs later."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Mapping

from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.results import Usage
from rankmill.jobs.contract.run import Run
from rankmill.jobs.protocol.runs import NOTHING_USED, Deleted, RunStore
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.system import system

_AT_ONCE_SECONDS = 1

logger = logging.getLogger(__name__)


class RunCleaner:
    """Removes keys and waiting jobs of ended runs from Redis. Threads may share the object; after a fork,
    parent and child may both use it.

    If the server cannot serve, the caller waits for about a second. After that, a background thread tries
    again and again, until the run's keys must have expired.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = system.Lock()
        self._left: deque[tuple[Run, list[ChunkId], float, Mapping[str, Usage]]] = deque()
        self._busy = False

    def remove(
        self,
        run: Run,
        chunks: Iterable[ChunkId],
        *,
        answered: Iterable[ChunkId] = (),
        hurry: bool = False,
        used: Mapping[str, Usage] = NOTHING_USED,
    ) -> Deleted | None:
        """Delete an ended run and its waiting jobs from Redis.

        Parameters
        ----------
        run
            The run.
        chunks
            Chunks without a result, whose jobs may still wait.
        answered
            Chunks with a result. They have no jobs any more, but their pairs may still be in Redis.
        hurry
            Whether the caller waits for only one attempt.
        used
            Tokens and device time of results, by the id of each result's entry in the run's stream. Before
            the deletion, these amounts are added to the tenant's account.

        Returns
        -------
        The result of `RunStore.delete`, or ``None`` if Redis could not serve. In that case, a background
        thread tries again, as long as this process lives.

        Raises
        ------
        RedisFailed
            The server refuses the command.
        """
        pending, done = list(chunks), list(answered)
        until = system.monotonic() + _AT_ONCE_SECONDS if hurry else math.inf
        try:
            with redis_errors(), waiting(most=0 if hurry else _AT_ONCE_SECONDS, until=until):
                return self._store.delete(run, pending, answered=done, used=used)
        except RedisUnavailable as error:
            with about(run=run.id):
                logger.warning("the run's keys in Redis will be removed later: %s", error)
            self._later(run, [*pending, *done], used)
            return None

    def _later(self, run: Run, chunks: list[ChunkId], used: Mapping[str, Usage]) -> None:
        if os.getpid() != self._process:  # after a fork, the thread and its runs belong to the parent
            self._begin()
        with self._lock:
            self._left.append((run, chunks, system.monotonic() + run.ttl, used))
            if not self._busy:
                self._busy = True
                self._store.later(self._remove_all)

    def _remove_all(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._busy = False
                    return
                run, chunks, until, used = self._left.popleft()
            try:
                with about(run=run.id), redis_errors():
                    deleted = self._store.delete(run, chunks, used=used)
                    if deleted.wrong:  # too late for an error: the caller already has the scores
                        logger.error("scores of the run are wrong: %s; score it again", deleted.wrong)
            except RedisUnavailable:
                if system.monotonic() < until:
                    with self._lock:
                        self._left.append((run, chunks, until, used))
            except Exception:
                logger.exception("the keys of run %s in Redis cannot be removed", run.id)
