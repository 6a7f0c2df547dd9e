"""The cluster as Redis knows it: queues, workers and runs, in a few round trips however large it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.utils import str_to_date
from rq.worker_registration import REDIS_WORKER_KEYS

from jobs import keys
from jobs.errors import WireError
from jobs.run import Progress, read_run
from jobs.worker_report import SCORING_FIELD, WorkerReport

PAGE_RUNS = 50
"""Runs on a page."""

_WORKER_PREFIX = f"{RQ_KEY_PREFIX}:worker:"
_WORKER_FIELDS = ("queues", "state", "birth", "death", "last_heartbeat", SCORING_FIELD)

WorkerStateName = Literal["idle", "busy", "lost", "foreign"]
"""``lost``: a ScoringWorker that has not beaten for its lease; ``foreign``: an RQ worker of another kind."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class QueueState(_Frozen):
    """A queue: jobs that wait, run and have failed for good, and the workers that can score them.

    ``oldest_seconds`` is how long ago the job that is next was made; ``None`` if none waits.
    """

    name: str
    waiting: int
    oldest_seconds: float | None
    started: int
    failed: int
    workers: int


class WorkerState(_Frozen):
    """A worker; ``report`` is what it says of itself, ``None`` where it says nothing (any more)."""

    name: str
    queues: tuple[str, ...]
    state: WorkerStateName
    beat_seconds: float | None
    report: WorkerReport | None


class RunState(_Frozen):
    """A run that is not finished; ``rows`` in all and ``seconds_left`` where they are known.

    ``quiet_seconds`` is how long ago the last result came, or the run was created if none has.
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


class Cluster(_Frozen):
    """All queues and workers, and one page of the runs, those last worked on first.

    ``at`` is in seconds since 1970; ``page`` counts from 0.
    """

    at: float
    queues: tuple[QueueState, ...]
    workers: tuple[WorkerState, ...]
    runs: tuple[RunState, ...]
    runs_total: int
    page: int
    page_size: int


def read_cluster(client: redis.Redis, *, page: int = 0, page_size: int = PAGE_RUNS) -> Cluster:
    """Look at the cluster.

    Parameters
    ----------
    client
        The server; responses as bytes.
    page, page_size
        Which runs: those from ``page * page_size`` on.
    """
    now = time.time()
    with client.pipeline(transaction=False) as pipe:
        pipe.smembers(Queue.redis_queues_keys)
        pipe.smembers(REDIS_WORKER_KEYS)
        pipe.zcount(keys.runs(), now, "+inf")
        pipe.zrange(keys.runs(), "+inf", now, desc=True, byscore=True, offset=page * page_size, num=page_size)
        queue_keys, worker_keys, total, run_ids = pipe.execute()
    workers = _workers(client, _names(worker_keys, _WORKER_PREFIX), now)
    queues = {*_names(queue_keys, Queue.redis_queue_namespace_prefix), *_queues_of(workers)}
    return Cluster(
        at=now,
        queues=_queues(client, sorted(queues), workers, now),
        workers=workers,
        runs=_runs(client, [run_id.decode() for run_id in run_ids], now),
        runs_total=total,
        page=page,
        page_size=page_size,
    )


def _workers(client: redis.Redis, names: list[str], now: float) -> tuple[WorkerState, ...]:
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(_WORKER_PREFIX + name, *_WORKER_FIELDS)
            pipe.get(keys.worker(name))
        replies = pipe.execute()
    found = []
    for name, fields, raw in zip(names, replies[::2], replies[1::2], strict=True):
        known = dict(zip(_WORKER_FIELDS, fields, strict=True))
        # Of one that is gone for long, RQ's list has but the name.
        if (raw or known["birth"]) and not known["death"]:
            found.append(_worker(name, known, raw, now))
    return tuple(found)


def _worker(name: str, known: Mapping[str, bytes | None], raw: bytes | None, now: float) -> WorkerState:
    report = None
    if raw is not None:
        with suppress(WireError):  # of another release
            report = WorkerReport.read_json(raw, f"the report of worker {name}")
    state: WorkerStateName = "idle"
    if raw is None:
        state = "lost" if known[SCORING_FIELD] else "foreign"
    elif known["state"] == b"busy":
        state = "busy"
    queues = (known["queues"] or b"").decode()
    beat = report.beat if report else _seconds(known["last_heartbeat"])
    age = None if beat is None else max(now - beat, 0.0)
    return WorkerState(
        name=name, queues=tuple(filter(None, queues.split(","))), state=state, beat_seconds=age, report=report
    )


def _queues(
    client: redis.Redis, names: list[str], workers: Iterable[WorkerState], now: float
) -> tuple[QueueState, ...]:
    connection: Any = client
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            queue = Queue(name, connection=connection)
            pipe.llen(queue.key)
            pipe.lindex(queue.key, 0)
            pipe.zcard(StartedJobRegistry.key_template.format(name))
            pipe.zcard(FailedJobRegistry.key_template.format(name))
        replies = pipe.execute()
        counts = [replies[at : at + 4] for at in range(0, len(replies), 4)]
        for _, first, *_ in counts:
            pipe.hget(Job.key_for((first or b"").decode()), "created_at")
        created = [_seconds(raw) for raw in pipe.execute()]
    live = [name for worker in workers if worker.state in {"idle", "busy"} for name in worker.queues]
    return tuple(
        QueueState(
            name=name,
            waiting=waiting,
            oldest_seconds=None if since is None else max(now - since, 0.0),
            started=started,
            failed=failed,
            workers=live.count(name),
        )
        for name, (waiting, _, started, failed), since in zip(names, counts, created, strict=True)
    )


def _runs(client: redis.Redis, ids: list[str], now: float) -> tuple[RunState, ...]:
    with client.pipeline(transaction=False) as pipe:
        for run_id in ids:
            pipe.hgetall(keys.run(run_id))
            pipe.get(keys.progress(run_id))
        replies = pipe.execute()
    found = []
    for run_id, raw, progress in zip(ids, replies[::2], replies[1::2], strict=True):
        with suppress(WireError):  # of another release
            if raw:  # not finished just now
                found.append(_run(run_id, raw, progress, now))
    return tuple(found)


def _run(run_id: str, raw: Mapping[bytes, bytes], noted: bytes | None, now: float) -> RunState:
    run = read_run(run_id, raw)
    progress = Progress.read_json(noted, f"the progress of run {run_id}") if noted else Progress()
    speed = progress.rows_per_second()
    left = None if run.rows is None or speed is None else (run.rows - progress.rows) / speed
    return RunState(
        id=run.id,
        queue=run.queue,
        model=run.spec.model,
        created=run.created,
        rows=run.rows,
        rows_done=progress.rows,
        row_errors=progress.row_errors,
        rows_per_second=speed,
        seconds_left=left,
        quiet_seconds=max(now - (progress.at or run.created), 0.0),
    )


def _names(found: Iterable[bytes], prefix: str) -> list[str]:
    return sorted(name.decode().removeprefix(prefix) for name in found)


def _queues_of(workers: Iterable[WorkerState]) -> set[str]:
    return {name for worker in workers for name in worker.queues}


def _seconds(raw: bytes | None) -> float | None:
    """RQ's way to write a time, in seconds since 1970."""
    return None if raw is None else str_to_date(raw).timestamp()
