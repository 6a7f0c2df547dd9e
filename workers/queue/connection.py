"""The Redis client that ``rq worker`` creates, before there is a worker."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, cast

import redis

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.connection import pool_for
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.queue.stopping import give_up


class Connection(redis.Redis):
    """Redis as rankmill's own commands connect to it; for RQ's option ``--connection-class``::

        RQ_CONNECTION_CLASS=rankmill.Connection rq worker rankmill --worker-class rankmill.ScoringWorker …

    RQ's own class ends the worker if the server is away at its start, with a traceback if the URL is
    malformed. This one waits for the server as a worker does later (`redis_wait_seconds`), names in
    one line what is wrong with a URL (exit code 78), and also understands ``redis+sentinel://``.
    """

    @classmethod
    def from_url(cls, url: str, *_: Any, **__: Any) -> Connection:
        """A client for `url`; settings come from the environment. Ends the process if one is wrong."""
        try:
            settings = load_settings()
            pool = pool_for(url, Patience(settings.redis_wait_seconds, give_up))
        except ConfigError as error:
            print(mask_passwords(f"the worker cannot start: {error}"), file=sys.stderr)
            raise SystemExit(os.EX_CONFIG) from None
        # The first process of a container ignores SIGTERM without a handler; the worker sets its own later.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        set_up(settings.log_level, settings.log_format)  # for lines about a wait
        return cast("Connection", cls.from_pool(pool))
