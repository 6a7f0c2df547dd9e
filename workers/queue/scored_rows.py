"""Counts the scored rows of a worker's chunks into their runs, so that progress does not wait for a chunk."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import redis

from rankmill.jobs.protocol.runs import RunStore

if TYPE_CHECKING:
    from rankmill.workers.queue.claims import Claims

BEAT_SECONDS = 1.0
"""Time between two counts, while there are scored rows of unfinished chunks."""

_LOOK_SECONDS = 0.25
"""How soon after the first score the first count follows."""

logger = logging.getLogger(__name__)


class ScoredRowsBeat:
    """Writes the counts from a thread of its own, with one small command a second for all runs.

    Parameters
    ----------
    store
        The server.
    claims
        The worker's claims.
    """

    def __init__(self, store: RunStore, claims: Claims) -> None:
        self._store = store
        self._claims = claims
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scored-rows", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        last = -BEAT_SECONDS
        while not self._stopped.wait(_LOOK_SECONDS):
            if time.monotonic() - last < BEAT_SECONDS:
                continue
            counts = self._counts()
            if counts:
                last = time.monotonic()
                try:
                    self._store.write_scored_rows(counts)
                except redis.ResponseError as error:  # for instance, the key is not a hash
                    logger.warning("the scored rows cannot be counted: %s", error)
                except Exception:  # progress is worth no worker
                    logger.exception("the scored rows cannot be counted, trying again")

    def _counts(self) -> dict[str, dict[int, int]]:
        """Scored rows by run and chunk, of the claimed chunks with any."""
        counts: dict[str, dict[int, int]] = {}
        for claim in list(self._claims.held.values()):
            if claim.run and claim.work and claim.source and claim.source.in_redis:
                rows = claim.work.done
                if rows:
                    counts.setdefault(claim.run.id, {})[claim.chunk] = rows
        return counts
