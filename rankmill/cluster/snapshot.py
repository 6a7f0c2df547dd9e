"""A snapshot of the cluster from Redis: queues, workers and runs, in a few round trips whatever its size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from rq import Queue
from rq.worker_registration import REDIS_WORKER_KEYS

from rankmill.cluster.damage import Damage, Damaged
from rankmill.cluster.queues import QueueState, read_queues
from rankmill.cluster.runners import FileQueueState, read_file_queues
from rankmill.cluster.workers import WORKER_PREFIX, WorkerState, read_workers
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.run import Progress, read_run
from rankmill.jobs.protocol.queues import UNUSED_SECONDS
from rankmill.jobs.protocol.set_aside import SetAside, jobs_set_aside
from rankmill.jobs.runtime.connection import refuses_writes

PAGE_RUNS = 50
"""Runs on a page."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class RunState(_Frozen):
    """An unfinished run; ``rows`` (the total) and ``seconds_left`` are ``None`` if they are not known.

    ``quiet_seconds`` is the time since the last result, or since the run's creation if it has no result.
    """

    id: str
    queue: str
    model: str
    created: float
    rows: int | None
    rows_done: int
    row_errors: int
    rows_per_second: float | None
    seconds_left: float | None
    quiet_seconds: float


class Snapshot(_Frozen):
    """All queues and workers, and one page of the runs, the most recently active first.

    ``at`` is in seconds since 1970; ``page`` counts from 0; ``damaged`` lists the keys that cannot be read.
    ``trouble`` is the reason why the server takes no writes now, if it takes none; ``set_aside`` lists the
    jobs that no worker could read. ``file_queues`` are those of submitted runs, which runners take.
    """

    at: float
    trouble: str | None = None
    set_aside: tuple[SetAside, ...] = ()
    queues: tuple[QueueState, ...]
    workers: tuple[WorkerState, ...]
    runs: tuple[RunState, ...]
    runs_total: int
    page: int
    page_size: int
    damaged: tuple[Damaged, ...] = ()
    file_queues: tuple[FileQueueState, ...] = ()


def read_cluster(client: redis.Redis, *, page: int = 0, page_size: int = PAGE_RUNS) -> Snapshot:
    """Read the state of the cluster.

    Parameters
    ----------
    client
        The server; responses as bytes.
    page, page_size
        Which runs to read: ``page_size`` runs from position ``page * page_size`` on.

    Raises
    ------
    redis.RedisError
        The server cannot serve.
    """
    damage = Damage()
    now = time.time()
    with client.pipeline(transaction=False) as pipe:
        pipe.smembers(Queue.redis_queues_keys)
        pipe.smembers(REDIS_WORKER_KEYS)
        pipe.zcount(keys.runs(), now, "+inf")
        pipe.zrange(keys.runs(), "+inf", now, desc=True, byscore=True, offset=page * page_size, num=page_size)
        pipe.zrangebyscore(keys.queues(), now - UNUSED_SECONDS, "+inf")
        pipe.zrangebyscore(keys.file_queues(), "-inf", "+inf")
        queue_keys, worker_keys, total, run_ids, used_queues, file_queues = damage.replies(
            pipe,
            [
                (Queue.redis_queues_keys, ()),
                (REDIS_WORKER_KEYS, ()),
                (keys.runs(), 0),
                (keys.runs(), ()),
                (keys.queues(), ()),
                (keys.file_queues(), ()),
            ],
        )
    names = _names(damage.texts(worker_keys, REDIS_WORKER_KEYS), WORKER_PREFIX)
    workers = read_workers(client, names, now, damage)
    used = damage.texts(used_queues, keys.queues())
    queues = _names(damage.texts(queue_keys, Queue.redis_queues_keys), Queue.redis_queue_namespace_prefix)
    of_files = set(damage.texts(file_queues, keys.file_queues()))
    queues = [name for name in queues if name not in of_files]  # runners take them, not workers
    return Snapshot(
        at=now,
        trouble=refuses_writes(client),
        set_aside=tuple(jobs_set_aside(client)),
        queues=read_queues(client, queues, used, workers, now, damage),
        workers=workers,
        runs=_runs(client, damage.texts(run_ids, keys.runs()), now, damage),
        runs_total=total,
        page=page,
        page_size=page_size,
        file_queues=read_file_queues(client, of_files, now, damage),
        damaged=damage.found(),
    )


def _runs(client: redis.Redis, ids: list[str], now: float, damage: Damage) -> tuple[RunState, ...]:
    expected: list[tuple[str, Any]] = []
    with client.pipeline(transaction=False) as pipe:
        for run_id in ids:
            pipe.hgetall(keys.run(run_id))
            pipe.get(keys.progress(run_id))
            expected += [(keys.run(run_id), {}), (keys.progress(run_id), None)]
        replies = damage.replies(pipe, expected)
    found = []
    for run_id, raw, progress in zip(ids, replies[::2], replies[1::2], strict=True):
        if not raw:
            continue  # finished just now
        try:
            found.append(_run(run_id, raw, _progress(run_id, progress, damage), now))
        except (WireError, ArithmeticError, ValidationError) as error:
            damage.note(keys.run(run_id), error)
    return tuple(found)


def _progress(run_id: str, raw: bytes | None, damage: Damage) -> Progress:
    if raw is not None:
        try:
            return Progress.read_json(raw, "the progress")
        except WireError as error:
            damage.note(keys.progress(run_id), error)
    return Progress()


def _run(run_id: str, raw: Mapping[bytes, bytes], progress: Progress, now: float) -> RunState:
    run = read_run(run_id, raw)
    return RunState(
        id=run.id,
        queue=run.queue,
        model=run.spec.model,
        created=run.created,
        rows=run.rows,
        rows_done=progress.rows,
        row_errors=progress.row_errors,
        rows_per_second=progress.rows_per_second(),
        seconds_left=progress.seconds_left(run.rows),
        quiet_seconds=max(now - (progress.at or run.created), 0.0),
    )


def _names(found: Iterable[str], prefix: str) -> list[str]:
    return sorted(name.removeprefix(prefix) for name in found)
