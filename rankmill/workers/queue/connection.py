"""Connects a worker to Redis, waits while the server cannot serve, and ends the worker if that takes too
long.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import redis

from rankmill.jobs.contract.errors import ConfigError, RedisUnavailable
from rankmill.jobs.runtime.connection import check_mode, impatient, pool_for, unreachable
from rankmill.jobs.runtime.hosts import SUPERVISED
from rankmill.jobs.runtime.logs import complain, set_up
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system

if TYPE_CHECKING:  # a connection does not need the engine
    from rankmill.workers.engine.pipeline import Pipeline
    from rankmill.workers.queue.claims import Claims

_CHECK_SECONDS = 0.2
"""Seconds between two checks whether Redis answers, while a worker is stopping."""

_PROBE_SECONDS = 0.5
"""While a worker is stopping, a check fails if Redis takes longer than this (s) to answer."""

IDLE_SECONDS = 1.0
"""A stopping worker without claimed chunks waits this long (s) for Redis, and so does any worker after a
second signal.
"""

BUSY_SECONDS = 10.0
"""A stopping worker that must still write scores or hand chunks back waits this long (s) for Redis, counted
from the end of its last batch.
"""

_MISSES = 2
"""If Redis fails this many checks in a row, the stopping worker's process ends. On a busy host, a healthy
server may be late once.
"""

logger = logging.getLogger(__name__)


class Connection(redis.Redis):
    """Connects to Redis as rankmill's own commands do, if RQ's ``--connection-class`` names this class::

        RQ_CONNECTION_CLASS=rankmill.Connection rq worker rankmill --worker-class rankmill.ScoringWorker …

    RQ's own class ends the worker if the server is away at its start, and shows a traceback if the URL is
    malformed. This class waits for the server as a worker does later (`redis_wait_seconds`), tells in one
    line what is wrong with a URL (exit code 78), and also accepts ``redis+sentinel://``.
    """

    @classmethod
    def from_url(cls, url: str, *_: Any, **__: Any) -> Connection:
        """A client for `url`, with settings from the environment; ends the process if the URL or a setting is
        wrong.
        """
        try:
            settings = load_settings()
            pool = pool_for(url, Patience(settings.redis_wait_seconds, give_up))
            check_mode(impatient(redis.Redis.from_pool(pool)))
        except ConfigError as error:
            complain(mask_passwords(f"the worker cannot start: {error}"))
            raise SystemExit(os.EX_CONFIG) from None
        # Until the worker sets its own handler: without one, the first process of a container ignores
        # SIGTERM.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        set_up(settings.log_level, settings.log_format)  # so that a wait can be logged
        return cast("Connection", cls.from_pool(pool))


class LastResort:
    """Ends the process of a stopping worker if Redis does not answer, because a command to Redis might hang.

    Parameters
    ----------
    connection, patience
        The worker's client, and how it waits for the server.
    claims, pipeline
        The claims that the worker must still hand back, and the work that it must still finish.
    """

    def __init__(
        self, connection: redis.Redis, patience: Patience, claims: Claims, pipeline: Pipeline
    ) -> None:
        self._probe = impatient(connection, _PROBE_SECONDS)
        self._patience = patience
        self._claims = claims
        self._pipeline = pipeline
        self.signals = 0
        """The number of signals to stop that the worker has got: 0, 1, or 2, which means to stop at once."""

    def start(self) -> None:
        """Start the thread that ends a stopping process if Redis does not answer.

        It has a connection of its own, so that no command of another thread can block it.
        """
        system.Thread(target=self._watch, name="last-resort", daemon=True).start()

    def _watch(self) -> None:
        signals, since, misses = 0, system.monotonic(), 0
        while True:
            system.sleep(_CHECK_SECONDS)
            now = system.monotonic()
            if self.signals != signals:
                signals, since = self.signals, now
            if signals == 1 and self._pipeline.working:
                since = now
            limit = BUSY_SECONDS if signals == 1 and self._claims.unanswered else IDLE_SECONDS
            if signals and now - since >= limit:
                silent = self._patience.trouble or unreachable(self._probe)
                misses = misses + 1 if silent else 0
                if misses >= _MISSES:
                    self._end()

    def _end(self) -> None:
        held = len(self._claims.unanswered)
        if held:
            logger.warning("Redis cannot serve: %d chunks are not handed back, their leases will end", held)
        logger.info("stopped without unregistering: Redis cannot serve")
        logging.shutdown()
        system.exit(1 if held else 0)


def stop_without_supervisor() -> None:
    """Stop this worker, as on SIGTERM, when its supervisor ends.

    A supervisor is the process that started this worker and starts it again after a crash, if there is one.
    """
    if os.environ.get(SUPERVISED):
        system.Thread(target=_wait_for_its_end, name="supervisor", daemon=True).start()


def _wait_for_its_end() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    logger.warning("stopping: the process that started this worker, and keeps it running, is gone")
    os.kill(os.getpid(), signal.SIGTERM)


def give_up(error: RedisUnavailable) -> None:
    """End the worker's process because Redis cannot serve. The leases of its jobs end by themselves."""
    logger.critical("the worker ends: %s", error)
    logging.shutdown()
    system.exit(os.EX_UNAVAILABLE)
