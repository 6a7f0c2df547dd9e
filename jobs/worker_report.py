"""Who works on a queue: RQ's worker list, and what the ScoringWorkers among those say of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import redis
from pydantic import Field
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.worker_registration import get_keys

from jobs import keys
from jobs.schema import Count, Seconds, WireModel


@dataclass(frozen=True)
class QueueWorkers:
    """Names of the live workers of a queue."""

    scoring: frozenset[str]
    other: frozenset[str]


SCORING_FIELD = "scoring"
"""Field in RQ's hash of a worker, which outlives the worker for some minutes: it is a ScoringWorker."""

STAGES = ("wait", "fetch", "tokenize", "forward", "write")
"""What a worker's time goes into: waiting for work, then the way of a chunk."""

LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Upper bounds in seconds of the time from a chunk's submission to its result."""


class WorkerReport(WireModel):
    """What a ScoringWorker says of itself with every heartbeat; counts are since its start.

    ``started`` and ``beat`` are in seconds since 1970; ``stage_seconds`` has one value for each of
    `STAGES`; ``latency_counts`` counts chunks for each of `LATENCY_BUCKETS` and, last, beyond them.
    ``refusals`` are reasons why it leaves chunks of some model or run to others just now.
    ``metrics_url`` is where Prometheus finds it, ``None`` if it serves no metrics.
    """

    added = frozenset({"refusals"})

    device: str
    started: Seconds
    beat: Seconds
    metrics_url: str | None = None
    models: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    resident_bytes: Count = 0
    claimed_jobs: Count = 0
    claimed_pairs: Count = 0
    chunks: Count = 0
    retried_chunks: Count = 0
    pairs: Count = 0
    row_errors: Count = 0
    batches: Count = 0
    tokens: Count = 0
    padded_tokens: Count = 0
    stage_seconds: tuple[Seconds, ...] = Field(
        default=(0.0,) * len(STAGES), min_length=len(STAGES), max_length=len(STAGES)
    )
    latency_counts: tuple[Count, ...] = Field(
        default=(0,) * (len(LATENCY_BUCKETS) + 1),
        min_length=len(LATENCY_BUCKETS) + 1,
        max_length=len(LATENCY_BUCKETS) + 1,
    )


def announce_worker(client: redis.Redis, name: str, report: WorkerReport, ttl: int) -> None:
    """Say that the RQ worker `name` is a ScoringWorker; must be repeated within `ttl` seconds."""
    client.set(keys.worker(name), report.model_dump_json(), ex=ttl)


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


def worker_reports(client: redis.Redis, names: Iterable[str]) -> dict[str, WorkerReport]:
    """What each of the ScoringWorkers `names` said last; without those that are gone."""
    wanted = list(names)
    raw = cast("list[bytes | None]", client.mget([keys.worker(name) for name in wanted])) if wanted else []
    return {
        name: WorkerReport.read_json(report, f"the report of worker {name}")
        for name, report in zip(wanted, raw, strict=True)
        if report is not None
    }


def _text(value: bytes | str) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
