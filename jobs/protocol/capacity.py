"""What the live workers of a queue claim ahead: one of them sums it up in a key that producers read."""

from __future__ import annotations

from typing import Any, cast

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import Count, WireModel
from rankmill.jobs.protocol.worker_report import WorkerReport, listed_workers
from rankmill.jobs.runtime.patience import cannot_serve

_FRESH_SECONDS = 1
"""A sum is made again after so long, so that it costs the same whatever the number of workers is."""


class Capacity(WireModel):
    """The live ScoringWorkers of a queue that take chunks, and the pairs that they claim ahead in all."""

    workers: Count = 0
    claim_ahead: Count = 0


def write_capacity(client: redis.Redis, queue: str, ttl: int) -> None:
    """Sum up the reports of the queue's workers, for `ttl` seconds, unless that was done just now."""
    connection: Any = client
    if connection.pttl(keys.capacity(queue)) > 1000 * (ttl - _FRESH_SECONDS):
        return
    wanted = [keys.worker(name) for name in listed_workers(client, queue)]
    reports = cast("list[bytes | None]", connection.mget(wanted)) if wanted else []
    ahead = [pairs for raw in reports if raw is not None and (pairs := _claim_ahead(raw)) is not None]
    capacity = Capacity(workers=len(ahead), claim_ahead=sum(ahead))
    connection.set(keys.capacity(queue), capacity.model_dump_json(), ex=ttl)


def read_capacity(client: redis.Redis, queue: str) -> Capacity:
    """What `write_capacity` wrote; nothing if that is too long ago, or damaged."""
    try:
        raw = cast("bytes | None", client.get(keys.capacity(queue)))
        return Capacity() if raw is None else Capacity.read_json(raw, "the capacity of the queue")
    except WireError:
        return Capacity()
    except redis.ResponseError as error:
        if cannot_serve(error):
            raise
        return Capacity()  # the key is no string


def _claim_ahead(raw: bytes) -> int | None:
    """Pairs that a worker claims ahead; ``None`` if it is drained and claims nothing."""
    try:
        report = WorkerReport.read_json(raw, "the report")
    except WireError:  # of another release, perhaps
        return 0
    return None if report.drained else report.claim_ahead
