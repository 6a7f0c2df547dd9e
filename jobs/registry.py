"""Who works on a queue: RQ's worker list, and which of those are ScoringWorkers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.worker_registration import get_keys

from jobs import keys


@dataclass(frozen=True)
class QueueWorkers:
    """Names of the live workers of a queue."""

    scoring: frozenset[str]
    other: frozenset[str]


def announce_worker(client: redis.Redis, name: str, device: str, ttl: int) -> None:
    """Say that the RQ worker `name` is a ScoringWorker; must be repeated within `ttl` seconds."""
    client.set(keys.worker(name), device, ex=ttl)


def withdraw_worker(client: redis.Redis, name: str) -> None:
    """Take the announcement back."""
    client.delete(keys.worker(name))


def queue_workers(client: redis.Redis, queue: str) -> QueueWorkers:
    """The live workers that listen on `queue`, by kind."""
    connection: Any = client
    prefix = f"{RQ_KEY_PREFIX}:worker:"
    rq_keys = get_keys(queue=Queue(queue, connection=connection))
    names = [key.removeprefix(prefix) for key in map(_text, rq_keys)]
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.exists(prefix + name)
            pipe.exists(keys.worker(name))
        flags = pipe.execute()
    alive = {name: bool(ours) for name, rq, ours in zip(names, flags[::2], flags[1::2], strict=True) if rq}
    return QueueWorkers(
        scoring=frozenset(name for name, ours in alive.items() if ours),
        other=frozenset(name for name, ours in alive.items() if not ours),
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
