"""The queues of a cluster, as `rankmill.cluster.snapshot` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import redis
from pydantic import BaseModel, ConfigDict
from rq import Queue
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry

from rankmill.cluster.damage import Damage
from rankmill.jobs.protocol.ordered_queue import is_bulk_job

if TYPE_CHECKING:
    from rankmill.cluster.workers import WorkerState

_LOOK_AT = 256
"""Waiting jobs of a queue among which the next bulk chunk is looked for."""


class QueueState(BaseModel):
    """A queue: its waiting, started and finally failed jobs, and the number of its live ScoringWorkers.

    ``workers`` take chunks; those that are ``drained`` are not among them. ``oldest_seconds`` is the age of
    the next request or bulk chunk, whichever is older; ``None`` if none waits.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    name: str
    waiting: int
    oldest_seconds: float | None
    started: int
    failed: int
    workers: int
    drained: int = 0


def read_queues(
    client: redis.Redis,
    known: Iterable[str],
    used: Iterable[str],
    workers: Sequence[WorkerState],
    now: float,
    damage: Damage,
) -> tuple[QueueState, ...]:
    """Those of the `known` queues that are not empty, those `used` lately, and those that have workers."""
    connection: Any = client
    listed = {*used, *(name for worker in workers for name in worker.queues)}
    names = sorted({*known, *listed})
    with connection.pipeline(transaction=False) as pipe:
        expected: list[tuple[str, Any]] = []
        for name in names:
            queue = Queue(name, connection=connection)
            started = StartedJobRegistry.key_template.format(name)
            failed = FailedJobRegistry.key_template.format(name)
            pipe.llen(queue.key)
            pipe.lrange(queue.key, 0, _LOOK_AT - 1)
            pipe.zcard(started)
            pipe.zcard(failed)
            expected += [(queue.key, 0), (queue.key, ()), (started, 0), (failed, 0)]
        replies = damage.replies(pipe, expected)
        counts = [replies[at : at + 4] for at in range(0, len(replies), 4)]
        firsts = [
            Job.key_for(damage.text(each, f"{Queue.redis_queue_namespace_prefix}{name}") or "")
            for name, (_, ids, *_) in zip(names, counts, strict=True)
            # Requests are before bulk work, however old it is.
            for each in (next(iter(ids), b""), next(filter(is_bulk_job, ids), b""))
        ]
        for job in firsts:
            pipe.hget(job, "created_at")
        created = damage.replies(pipe, [(job, None) for job in firsts])
    live = [name for worker in workers if worker.state in {"idle", "busy"} for name in worker.queues]
    drained = [
        name for worker in workers if worker.state in {"draining", "drained"} for name in worker.queues
    ]
    times = [damage.seconds(raw, job) for job, raw in zip(firsts, created, strict=True)]
    oldest = [min(filter(None, pair), default=None) for pair in zip(times[::2], times[1::2], strict=True)]
    return tuple(
        QueueState(
            name=name,
            waiting=waiting,
            oldest_seconds=None if since is None else max(now - since, 0.0),
            started=started,
            failed=failed,
            workers=live.count(name),
            drained=drained.count(name),
        )
        for name, (waiting, _, started, failed), since in zip(names, counts, oldest, strict=True)
        if waiting or started or name in listed
    )
