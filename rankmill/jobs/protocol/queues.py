"""The queues that were in use lately, and how many pairs the live workers of each queue claim ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import redis
from redis.client import Pipeline

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import Count, WireModel
from rankmill.jobs.protocol.worker_report import known_reports, listed_workers
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.jobs.system import system

UNUSED_SECONDS = 86400
"""A queue counts as unused if no worker has served it and no run has begun in it for this many seconds."""

_FRESH_SECONDS = 1
"""A worker does not compute the capacity of a queue if another worker has written it less than this many
seconds ago.
"""


class QueueCapacity(WireModel):
    """How many live ScoringWorkers of a queue take chunks, and how many pairs they claim ahead in all."""

    workers: Count = 0
    claim_ahead: Count = 0


def use_queues(pipe: Pipeline, names: Iterable[str]) -> None:
    """Add commands to `pipe` that record that these queues are in use now."""
    now = system.now()
    used = dict.fromkeys(names, now)
    if used:
        pipe.zremrangebyscore(keys.queues(), 0, now - UNUSED_SECONDS)
        pipe.zadd(keys.queues(), used)
        pipe.expire(keys.queues(), UNUSED_SECONDS)


def write_capacity(client: redis.Redis, queue: str, ttl: int) -> None:
    """Write for producers how many live workers of a queue take chunks, and how many pairs they claim ahead.

    The numbers expire in `ttl` seconds. Nothing is written if a worker wrote them less than a second ago.
    """
    connection: Any = client
    seconds = connection.pttl(keys.capacity(queue)) / 1000
    # If more than `ttl` seconds are left, the server's clock has jumped back since the numbers were written.
    if ttl - _FRESH_SECONDS < seconds <= ttl:
        return
    reports = known_reports(client, listed_workers(client, queue)).values()
    ahead = [report.claim_ahead if report else 0 for report in reports if not (report and report.drained)]
    capacity = QueueCapacity(workers=len(ahead), claim_ahead=sum(ahead))
    connection.set(keys.capacity(queue), capacity.written(), ex=ttl)


def read_capacity(client: redis.Redis, queue: str) -> QueueCapacity:
    """Read how many workers of a queue take chunks, and how many pairs they claim ahead.

    Both numbers are 0 if nothing was written lately, or if the entry is damaged.
    """
    try:
        raw = cast("bytes | None", client.get(keys.capacity(queue)))
        return QueueCapacity() if raw is None else QueueCapacity.read_json(raw, "the capacity of the queue")
    except (WireError, redis.ResponseError) as error:  # a damaged entry, or a key that is not a string
        if cannot_serve(error):
            raise
        return QueueCapacity()
