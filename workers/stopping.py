"""How long a worker goes on while its server cannot serve, or refuses a command, and how it ends then."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from jobs.errors import RedisFailed, RedisUnavailable

_LOOK_SECONDS = 0.2

IDLE_SECONDS = 1.0
"""Longest wait for the server before the end, with no chunks claimed or after a second signal."""

BUSY_SECONDS = 10.0
"""Longest wait, after the batch in progress, with scores to write or chunks to hand back."""

_MISSES = 2
"""Failed checks in a row before the process ends: on a busy host, a healthy server may be late once."""

_REFUSED_SECONDS = 30
"""How often to say that Redis refuses a command."""

_PAUSE_SECONDS = 1
"""From one attempt at such a command to the next."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LastResort:
    """Ends a stopping process that the server holds up: one of its commands may wait or hang.

    Parameters
    ----------
    told
        How often the worker was told to stop.
    held
        How many chunks it has claimed.
    working
        Whether a batch is in the forward.
    serving
        Whether the server answers and can serve.
    """

    told: Callable[[], int]
    held: Callable[[], int]
    working: Callable[[], bool]
    serving: Callable[[], bool]

    def start(self) -> None:
        """Watch from a thread that no command can block."""
        threading.Thread(target=self._watch, name="last-resort", daemon=True).start()

    def _watch(self) -> None:
        told, since, misses = 0, time.monotonic(), 0
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if self.told() != told:
                told, since = self.told(), now
            if told == 1 and self.working():
                since = now
            limit = BUSY_SECONDS if told == 1 and self.held() else IDLE_SECONDS
            if told and now - since >= limit:
                misses = 0 if self.serving() else misses + 1
                if misses >= _MISSES:
                    self._end()

    def _end(self) -> None:
        held = self.held()
        if held:
            logger.warning("Redis cannot serve: %d chunks are not handed back, their leases will end", held)
        logger.info("stopped, without a word to Redis")
        logging.shutdown()
        os._exit(1 if held else 0)


class RefusedCommands:
    """Redis refuses what it should not (the queue's key is no list, say): waits until somebody mends that.

    `seconds` is for how long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def bear(self, error: redis.ResponseError) -> None:
        """Wait before the next attempt.

        Raises
        ------
        RedisFailed
            It was refused for long enough.
        """
        now = time.monotonic()
        if self._since is None or int(now - self._since) % _REFUSED_SECONDS == 0:
            logger.error("Redis refuses a command, trying again: %s", error)
        if self._since is None:
            self._since = now
        if now - self._since > self._seconds:
            raise RedisFailed(f"Redis refuses a command: {error}")
        time.sleep(_PAUSE_SECONDS)


def give_up(error: RedisUnavailable) -> None:
    """End the process, with whatever is claimed: its leases have ended long ago."""
    logger.critical("ending: %s", error)
    logging.shutdown()
    os._exit(os.EX_UNAVAILABLE)
