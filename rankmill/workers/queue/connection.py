"""Connects a worker to Redis, waits while the server cannot serve, and ends the worker if that takes too
long.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Any, cast

import redis

from rankmill.jobs.contract.errors import ConfigError, RedisUnavailable
from rankmill.jobs.runtime.connection import check_mode, impatient, pool_for
from rankmill.jobs.runtime.hosts import SUPERVISED
from rankmill.jobs.runtime.logs import complain, set_up
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system

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
        # Until the worker sets its own handler, this one ends the process. The first process of a container
        # ignores SIGTERM if it has no handler.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        set_up(settings.log_level, settings.log_format)  # so that a wait can be logged
        return cast("Connection", cls.from_pool(pool))


def stop_without_supervisor() -> None:
    """Stop this worker, as on SIGTERM, when its supervisor ends. Do nothing if it has no supervisor.

    A supervisor is a process that starts a worker, and starts it again after a crash.
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
