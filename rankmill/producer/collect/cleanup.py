"""Removes ended runs from Redis. If Redis cannot serve, a background thread removes the run later."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

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


def remove_run(
    store: RunStore,
    run: Run,
    chunks: Iterable[ChunkId],
    *,
    answered: Iterable[ChunkId] = (),
    hurry: bool = False,
    used: Mapping[str, Usage] = NOTHING_USED,
) -> Deleted | None:
    """Delete an ended run and its waiting jobs from Redis. If the server cannot serve, the caller waits for
    about a second.

    Parameters
    ----------
    store, run
        The store of runs in Redis, and the run.
    chunks
        Chunks without a result, whose jobs may still wait.
    answered
        Chunks with a result. They have no jobs any more, but their pairs may still be in Redis.
    hurry
        Whether the caller waits for about a second also if the server does not answer.
    used
        Tokens and device time of results, by the id of each result's entry in the run's stream. Before the
        deletion, these amounts are added to the tenant's account.

    Returns
    -------
    The result of `RunStore.delete`, or ``None`` if Redis could not serve. In that case, a background thread
    tries again as long as this process lives, until the run's keys would have expired.

    Raises
    ------
    RedisFailed
        The server refuses the command.
    """
    pending, done = list(chunks), list(answered)
    until = system.monotonic() + _AT_ONCE_SECONDS if hurry else math.inf
    try:
        with redis_errors(), waiting(most=0 if hurry else _AT_ONCE_SECONDS, until=until):
            return store.delete(run, pending, answered=done, used=used)
    except RedisUnavailable as error:
        with about(run=run.id):
            logger.warning("the run's keys in Redis will be removed later: %s", error)
    store.later(lambda: _remove_later(store, run, [*pending, *done], used))
    return None


def _remove_later(store: RunStore, run: Run, chunks: Sequence[ChunkId], used: Mapping[str, Usage]) -> None:
    until = system.monotonic() + run.ttl
    with about(run=run.id):
        while system.monotonic() < until:
            try:
                with redis_errors():
                    deleted = store.delete(run, chunks, used=used)
                if deleted.wrong:  # too late for an error: the caller already has the scores
                    logger.error("scores of the run are wrong: %s; score it again", deleted.wrong)
                return
            except RedisUnavailable:
                continue
            except Exception:
                logger.exception("the keys of run %s in Redis cannot be removed", run.id)
                return
