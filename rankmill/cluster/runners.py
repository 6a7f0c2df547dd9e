"""The queues of submitted runs, and how many runners they have, as `rankmill.cluster.snapshot` shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict
from rq import Queue
from rq.registry import StartedJobRegistry

from rankmill.cluster.damage import Damage
from rankmill.jobs.contract import keys


class FileQueueState(BaseModel):
    """A queue of submitted runs: how many wait and run, live runners, and webhooks that are not delivered."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    name: str
    waiting: int
    running: int
    runners: int
    webhooks: int


def read_file_queues(
    client: redis.Redis, names: Iterable[str], now: float, damage: Damage
) -> tuple[FileQueueState, ...]:
    """The state of each of the queues `names`."""
    known = sorted(names)
    if not known:
        return ()
    expected: list[tuple[str, Any]] = []
    with client.pipeline(transaction=False) as pipe:
        for name in known:
            queue = Queue(name, connection=client)
            started = StartedJobRegistry.key_template.format(name)
            pipe.llen(queue.key)
            pipe.zcard(started)
            pipe.zcount(keys.runners(name), now, "+inf")
            pipe.zcard(keys.webhooks(name))
            expected += [(queue.key, 0), (started, 0), (keys.runners(name), 0), (keys.webhooks(name), 0)]
        replies = damage.replies(pipe, expected)
    return tuple(
        FileQueueState(name=name, waiting=waiting, running=running, runners=runners, webhooks=webhooks)
        for name, waiting, running, runners, webhooks in zip(
            known, replies[::4], replies[1::4], replies[2::4], replies[3::4], strict=True
        )
    )
