"""Which workers refuse a run, why, and until when: a run ends when all of its queue's workers do."""

from __future__ import annotations

import time
from typing import Any

import redis

from rankmill.jobs.contract import keys


def refuse(
    client: redis.Redis,
    run_id: str,
    ttl: int,
    worker: str,
    reason: str,
    *,
    until: float,
    in_redis: bool = True,
) -> dict[str, str]:
    """Record that a worker cannot score a run; returns all workers that refuse it now, with their reasons.

    A refusal counts `until` then, in seconds since 1970, as its worker then tries again. Those of workers of
    the release before, which say no time, count until they are taken back. A run that
    should be `in_redis` and is not was cancelled.
    """
    said_key, until_key = keys.refusals(run_id), keys.refused_until(run_id)
    pipe: Any
    with client.pipeline() as pipe:
        pipe.hset(said_key, worker, reason)
        pipe.expire(said_key, ttl)
        pipe.zadd(until_key, {worker: until})
        pipe.expire(until_key, ttl)
        pipe.hgetall(said_key)
        pipe.zrange(until_key, "-inf", f"({time.time()}", byscore=True)
        pipe.exists(keys.run(run_id))
        *_, said, lapsed, there = pipe.execute()
    if in_redis and not there:  # it was cancelled meanwhile
        client.unlink(said_key, until_key)
    now = {name: why for name, why in said.items() if name not in lapsed}
    return {name.decode(errors="replace"): why.decode(errors="replace") for name, why in now.items()}


def take_back(client: redis.Redis, run_id: str, worker: str) -> None:
    """Remove a worker's refusal of a run, once the worker can score it."""
    pipe: Any
    with client.pipeline() as pipe:
        pipe.hdel(keys.refusals(run_id), worker)
        pipe.zrem(keys.refused_until(run_id), worker)
        pipe.execute()
