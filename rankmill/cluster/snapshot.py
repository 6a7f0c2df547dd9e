"""A snapshot of the cluster from Redis: queues, workers and runs, in a few round trips whatever its size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict, ValidationError
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.utils import str_to_date
from rq.worker_registration import REDIS_WORKER_KEYS

from jobs import keys
from jobs.errors import WireError
from jobs.run import Progress, read_run
from jobs.runtime.connection import refuses_writes
from jobs.store.set_aside import SetAside, jobs_set_aside
from jobs.store.worker_report import SCORING_FIELD, WorkerReport
from rankmill.cluster.damage import Damage, Damaged

PAGE_RUNS = 50
"""Runs on a page."""

_WORKER_PREFIX = f"{RQ_KEY_PREFIX}:worker:"
_WORKER_FIELDS = ("queues", "state", "birth", "death", "last_heartbeat", SCORING_FIELD)

WorkerStateName = Literal["idle", "busy", "lost", "foreign"]
"""``lost``: a ScoringWorker without a heartbeat for its lease; ``foreign``: an RQ worker of another class."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class QueueState(_Frozen):
    """A queue: its waiting, started and finally failed jobs, and the number of its live ScoringWorkers.

    ``oldest_seconds`` is the age of the next job; ``None`` if none waits.
    """

    name: str
    waiting: int
    oldest_seconds: float | None
    started: int
    failed: int
    workers: int


class WorkerState(_Frozen):
    """A worker; ``report`` is its own report, ``None`` if it has none or the report has expired."""

    name: str
    queues: tuple[str, ...]
    state: WorkerStateName
    beat_seconds: float | None
    report: WorkerReport | None


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
    jobs that no worker could read.
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
        queue_keys, worker_keys, total, run_ids = damage.replies(
            pipe,
            [(Queue.redis_queues_keys, ()), (REDIS_WORKER_KEYS, ()), (keys.runs(), 0), (keys.runs(), ())],
        )
    names = _names(damage.texts(worker_keys, REDIS_WORKER_KEYS), _WORKER_PREFIX)
    workers = _workers(client, names, now, damage)
    queues = _names(damage.texts(queue_keys, Queue.redis_queues_keys), Queue.redis_queue_namespace_prefix)
    return Snapshot(
        at=now,
        trouble=refuses_writes(client),
        set_aside=tuple(jobs_set_aside(client)),
        queues=_queues(client, sorted({*queues, *_queues_of(workers)}), workers, now, damage),
        workers=workers,
        runs=_runs(client, damage.texts(run_ids, keys.runs()), now, damage),
        runs_total=total,
        page=page,
        page_size=page_size,
        damaged=damage.found(),
    )


def _workers(client: redis.Redis, names: list[str], now: float, damage: Damage) -> tuple[WorkerState, ...]:
    nothing = [None] * len(_WORKER_FIELDS)
    expected: list[tuple[str, Any]] = []
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(_WORKER_PREFIX + name, *_WORKER_FIELDS)
            pipe.get(keys.worker(name))
            expected += [(_WORKER_PREFIX + name, nothing), (keys.worker(name), None)]
        replies = damage.replies(pipe, expected)
    found = []
    for name, fields, raw in zip(names, replies[::2], replies[1::2], strict=True):
        known = dict(zip(_WORKER_FIELDS, fields, strict=True))
        # RQ's list still has the name of a worker whose hash has expired.
        if (raw or known["birth"]) and not known["death"]:
            found.append(_worker(name, known, raw, now, damage))
    return tuple(found)


def _worker(
    name: str, known: Mapping[str, bytes | None], raw: bytes | None, now: float, damage: Damage
) -> WorkerState:
    report = None
    if raw is not None:
        try:
            report = WorkerReport.read_json(raw, "the report")
        except WireError as error:
            damage.note(keys.worker(name), error)
    state: WorkerStateName = "idle"
    if raw is None:
        state = "lost" if known[SCORING_FIELD] else "foreign"
    elif known["state"] == b"busy":
        state = "busy"
    key = _WORKER_PREFIX + name
    queues = damage.text(known["queues"] or b"", key) or ""
    beat = report.beat if report else _seconds(known["last_heartbeat"], key, damage)
    age = None if beat is None else max(now - beat, 0.0)
    return WorkerState(
        name=name, queues=tuple(filter(None, queues.split(","))), state=state, beat_seconds=age, report=report
    )


def _queues(
    client: redis.Redis, names: list[str], workers: Iterable[WorkerState], now: float, damage: Damage
) -> tuple[QueueState, ...]:
    connection: Any = client
    with connection.pipeline(transaction=False) as pipe:
        expected: list[tuple[str, Any]] = []
        for name in names:
            queue = Queue(name, connection=connection)
            started = StartedJobRegistry.key_template.format(name)
            failed = FailedJobRegistry.key_template.format(name)
            pipe.llen(queue.key)
            pipe.lindex(queue.key, 0)
            pipe.zcard(started)
            pipe.zcard(failed)
            expected += [(queue.key, 0), (queue.key, None), (started, 0), (failed, 0)]
        replies = damage.replies(pipe, expected)
        counts = [replies[at : at + 4] for at in range(0, len(replies), 4)]
        firsts = [
            Job.key_for(damage.text(first or b"", f"{Queue.redis_queue_namespace_prefix}{name}") or "")
            for name, (_, first, *_) in zip(names, counts, strict=True)
        ]
        for job in firsts:
            pipe.hget(job, "created_at")
        created = damage.replies(pipe, [(job, None) for job in firsts])
    live = [name for worker in workers if worker.state in {"idle", "busy"} for name in worker.queues]
    ages = [_seconds(raw, job, damage) for job, raw in zip(firsts, created, strict=True)]
    return tuple(
        QueueState(
            name=name,
            waiting=waiting,
            oldest_seconds=None if since is None else max(now - since, 0.0),
            started=started,
            failed=failed,
            workers=live.count(name),
        )
        for name, (waiting, _, started, failed), since in zip(names, counts, ages, strict=True)
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


def _queues_of(workers: Iterable[WorkerState]) -> set[str]:
    return {name for worker in workers for name in worker.queues}


def _seconds(raw: bytes | None, key: str, damage: Damage) -> float | None:
    """A time in RQ's format, in seconds since 1970; ``None`` if the value is absent or not a time."""
    try:
        return None if raw is None else str_to_date(raw).timestamp()
    except (ValueError, ArithmeticError):
        damage.note(key, f"{raw!r:.60} is not a time")
        return None
