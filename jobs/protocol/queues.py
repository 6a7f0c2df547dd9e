"""Which queues were in use lately; RQ's own list keeps every queue that there ever was."""

from __future__ import annotations

import time
from collections.abc import Iterable

from redis.client import Pipeline

from rankmill.jobs.contract import keys

UNUSED_SECONDS = 86400
"""A queue without producers, workers and chunks for this long (s) is no longer listed."""


def use_queues(pipe: Pipeline, names: Iterable[str]) -> None:
    """Add to `pipe` that a producer or worker uses these queues now."""
    now = time.time()
    used = dict.fromkeys(names, now)
    if used:
        pipe.zremrangebyscore(keys.queues(), 0, now - UNUSED_SECONDS)
        pipe.zadd(keys.queues(), used)
        pipe.expire(keys.queues(), UNUSED_SECONDS)
