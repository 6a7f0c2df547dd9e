"""How long a worker waits for a server that cannot serve or refuses a command, and how it then ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import redis

from rankmill.jobs.contract.errors import RedisFailed, RedisUnavailable
from rankmill.jobs.runtime.hosts import SUPERVISED

_CHECK_SECONDS = 0.2
"""Time between two checks of a stopping process."""

IDLE_SECONDS = 1.0
"""Longest wait for the server before the end, with no chunks claimed or after a second signal."""

BUSY_SECONDS = 10.0
"""Longest wait, after the batch in progress, with scores to write or chunks to hand back."""

_MISSES = 2
"""Failed checks in a row before the process ends: on a busy host, a healthy server may be late once."""

_REFUSED_SECONDS = 30
"""How often to log that Redis refuses a command."""

_PAUSE_SECONDS = 1
"""Time between two attempts at a refused command."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LastResort:
    """Ends a stopping process when the server does not answer and one of its commands may hang.

    Parameters
    ----------
    signals
        How many signals to stop the worker has got: 0, 1, or 2 for at once.
    held
        How many claimed chunks it holds.
    working
        Whether a forward is running.
    serving
        Whether the server answers and can serve.
    """

    signals: Callable[[], int]
    held: Callable[[], int]
    working: Callable[[], bool]
    serving: Callable[[], bool]

    def start(self) -> None:
        """Start the thread that watches; no command can block it."""
        threading.Thread(target=self._watch, name="last-resort", daemon=True).start()

    def _watch(self) -> None:
        signals, since, misses = 0, time.monotonic(), 0
        while True:
            time.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            if self.signals() != signals:
                signals, since = self.signals(), now
            if signals == 1 and self.working():
                since = now
            limit = BUSY_SECONDS if signals == 1 and self.held() else IDLE_SECONDS
            if signals and now - since >= limit:
                misses = 0 if self.serving() else misses + 1
                if misses >= _MISSES:
                    self._end()

    def _end(self) -> None:
        held = self.held()
        if held:
            logger.warning("Redis cannot serve: %d chunks are not handed back, their leases will end", held)
        logger.info("stopped without unregistering: Redis cannot serve")
        logging.shutdown()
        os._exit(1 if held else 0)


class RefusedCommands:
    """Waits while Redis refuses a command: somebody may repair the cause, such as a key that is not a list.

    Parameters
    ----------
    seconds
        How long to wait before giving up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def wait(self, error: redis.ResponseError) -> None:
        """Wait before the next attempt.

        Raises
        ------
        RedisFailed
            Redis has refused the command for longer than that.
        """
        now = time.monotonic()
        if self._since is None or int(now - self._since) % _REFUSED_SECONDS == 0:
            logger.error("Redis refuses a command, trying again: %s", error)
        if self._since is None:
            self._since = now
        if now - self._since > self._seconds:
            raise RedisFailed(f"Redis refuses a command: {error}")
        time.sleep(_PAUSE_SECONDS)


def stop_without_supervisor() -> None:
    """Stop as SIGTERM does when the process that keeps this one running is gone, if there is one.

    Nobody would start this worker again, nor stop it.
    """
    if os.environ.get(SUPERVISED):
        threading.Thread(target=_wait_for_its_end, name="supervisor", daemon=True).start()


def _wait_for_its_end() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    logger.warning("stopping: the process that started this worker, and keeps it running, is gone")
    os.kill(os.getpid(), signal.SIGTERM)


def give_up(error: RedisUnavailable) -> None:
    """End the process without handing claimed jobs back: their leases ended long ago."""
    logger.critical("ending: %s", error)
    logging.shutdown()
    os._exit(os.EX_UNAVAILABLE)
