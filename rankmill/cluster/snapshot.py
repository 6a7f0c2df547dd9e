"""Reads a snapshot of queues, workers and runs from Redis, in a few round trips for any size of the cluster.

A damaged key is listed with the reason, and all other keys are still shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, cast

import redis
from pydantic import BaseModel, ConfigDict, SerializeAsAny, ValidationError, computed_field
from rq import Queue
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.suspension import WORKERS_SUSPENDED

from rankmill.cluster.look import Look
from rankmill.cluster.watch import RunFigures, Seen, read_extensions
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.priority import priority_of
from rankmill.jobs.contract.run import Progress, read_run
from rankmill.jobs.protocol.queues import UNUSED_SECONDS
from rankmill.jobs.protocol.rq import ALL_WORKERS, WORKER_PREFIX
from rankmill.jobs.protocol.set_aside import SET_ASIDE, SetAside
from rankmill.jobs.protocol.worker_report import LAST_REPORTS, SCORING_FIELD, LastReport, WorkerReport
from rankmill.jobs.runtime.connection import refuses_writes
from rankmill.jobs.runtime.durability import Durability

PAGE_RUNS = 50

SLOW = 1 / 3
"""A worker is slow if its tokens per second are below this share of the usual speed of workers with the same
device and models.
"""

_LOOK_AT = 256
"""To find a queue's oldest job, at most this many tenants are looked at, and at most this many runs of a
tenant.
"""

_CHUNK_BYTES = 8 << 20
"""Bytes that a large chunk needs in Redis."""

_QUEUE_PREFIX = Queue.redis_queue_namespace_prefix
_WORKER_FIELDS = (
    "queues", "state", "birth", "death", "last_heartbeat", "pid", "hostname", SCORING_FIELD,
)  # fmt: skip

WorkerStateName = Literal["idle", "busy", "draining", "drained", "lost", "foreign"]
"""The state of a worker.

- ``idle`` or ``busy``: it takes chunks.
- ``draining``: it takes no new chunks, but has some left.
- ``drained``: it takes no new chunks, and has none left.
- ``lost``: a ScoringWorker without a heartbeat for the time of its lease.
- ``foreign``: an RQ worker of another class.
"""

DRAINED = {"draining", "drained"}
"""States of a worker that was told to take no new chunks."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Damaged(_Frozen):
    """A key in Redis that cannot be read, entirely or in part, and the reason."""

    key: str
    reason: str


class WorkerState(_Frozen):
    """A worker as Redis knows it.

    Attributes
    ----------
    beat_seconds
        Age of the last heartbeat.
    report
        The worker's own report; ``None`` if it is missing or cannot be read.
    host, pid
        Name of the worker's host, and the worker's process id there.
    relative_pace
        The worker's tokens per second, divided by the usual speed of workers with the same device and models.
        ``None`` if one of the two is unknown.
    """

    name: str
    queues: tuple[str, ...]
    state: WorkerStateName
    beat_seconds: float | None
    report: WorkerReport | None
    host: str | None = None
    pid: int | None = None
    relative_pace: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_slow(self) -> bool:
        return self.relative_pace is not None and self.relative_pace < SLOW


class QueueState(_Frozen):
    """The jobs and live ScoringWorkers of a queue, as numbers.

    Attributes
    ----------
    waiting, started, failed
        Numbers of jobs: those that wait, those that workers have begun, and those that have failed for good.
    oldest_seconds
        Age of the oldest of the jobs that come first in a waiting list; ``None`` if no job waits.
    workers
        Number of workers that take chunks.
    drained
        Number of workers that are draining or drained.
    """

    name: str
    waiting: int
    oldest_seconds: float | None
    started: int
    failed: int
    workers: int
    drained: int = 0


class ServerMemory(_Frozen):
    """The memory of the Redis server.

    Attributes
    ----------
    used, limit
        Bytes in use, and the limit (maxmemory); 0 for no limit.
    policy
        The setting maxmemory-policy.
    evicted
        Number of keys that the server has evicted so far.
    """

    used: int
    limit: int
    policy: str
    evicted: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_nearly_full(self) -> bool:
        return bool(self.limit) and self.limit - self.used < max(self.limit / 10, _CHUNK_BYTES)


class RunState(RunFigures):
    """An unfinished run.

    Attributes
    ----------
    quiet_seconds
        Time since the last result, or since the run's creation if no result has come.
    waiting
        Number of the run's chunks that wait in its queue. Always 0 for a request, because all requests of a
        tenant share one list.
    """

    quiet_seconds: float
    waiting: int = 0


class Snapshot(_Frozen):
    """The cluster at one time: all queues and workers, and one page of the runs, the most recently active
    first.

    Attributes
    ----------
    at
        When the cluster was read, in seconds since 1970.
    trouble
        Why the server accepts no writes now; ``None`` if it accepts them.
    suspended
        Whether ``rq suspend`` keeps all workers from taking chunks.
    set_aside
        Jobs that no worker could read.
    last_reports
        Last reports of workers that stopped because they computed wrong scores, at most 100. They expire when
        no worker has stopped for this reason for a week.
    page
        Number of the page of runs, from 0.
    damaged
        Keys that cannot be read.
    extensions
        What each extension shows, by the extension's name.
    durability
        Which data the server may lose, by its settings; ``None`` unless the caller has added this.
    memory
        The memory of the server; ``None`` if the server does not tell it.
    """

    at: float
    trouble: str | None = None
    suspended: bool = False
    set_aside: tuple[SetAside, ...] = ()
    last_reports: tuple[LastReport, ...] = ()
    queues: tuple[QueueState, ...]
    workers: tuple[WorkerState, ...]
    runs: tuple[RunState, ...]
    runs_total: int
    page: int
    page_size: int
    damaged: tuple[Damaged, ...] = ()
    extensions: dict[str, SerializeAsAny[Seen]] = {}
    durability: Durability | None = None
    memory: ServerMemory | None = None


def read_cluster(client: redis.Redis, *, page: int = 0, page_size: int = PAGE_RUNS) -> Snapshot:
    """Read the state of the cluster (its queues, workers and runs) from Redis.

    Parameters
    ----------
    client
        A client of the server, whose responses are bytes.
    page, page_size
        The page of runs to read: ``page_size`` runs from position ``page * page_size`` on.

    Raises
    ------
    redis.RedisError, RedisUnavailable
        The server cannot serve.
    """
    return _Reader(client).snapshot(page, page_size)


class _Reader(Look):
    def snapshot(self, page: int, page_size: int) -> Snapshot:
        now = self.now
        # These are the arguments desc, withscores, score_cast_func, byscore and bylex of redis-py's zrange.
        latest_first = (True, False, float, True, False)
        ((queue_keys, worker_keys, total, run_ids, used, suspended),) = self.replies(
            [""],
            lambda _: [
                ("smembers", Queue.redis_queues_keys, ()),
                ("smembers", ALL_WORKERS, ()),
                ("zcount", keys.runs(), 0, now, "+inf"),
                ("zrange", keys.runs(), (), "+inf", now, *latest_first, page * page_size, page_size),
                ("zrangebyscore", keys.queues(), (), now - UNUSED_SECONDS, "+inf"),
                ("exists", WORKERS_SUSPENDED, 0),
            ],
        )
        workers = _compared(self._workers(_names(self.texts(worker_keys, ALL_WORKERS), WORKER_PREFIX)))
        queues = _names(self.texts(queue_keys, Queue.redis_queues_keys), _QUEUE_PREFIX)
        seen = read_extensions(self)
        of_others = {name for extension in seen.values() for name in extension.queues()}
        queues = [name for name in queues if name not in of_others]
        return Snapshot(
            at=now,
            trouble=refuses_writes(self._client),
            suspended=bool(suspended),
            set_aside=tuple(SET_ASIDE.read(self._client)),
            last_reports=tuple(LAST_REPORTS.read(self._client)),
            queues=self._queues(queues, self.texts(used, keys.queues()), workers),
            workers=workers,
            runs=self._runs(self.texts(run_ids, keys.runs())),
            runs_total=total,
            page=page,
            page_size=page_size,
            extensions=seen,
            memory=_memory(self._client),
            damaged=tuple(Damaged(key=key, reason=reason) for key, reason in self.damaged.items()),
        )

    def _workers(self, names: list[str]) -> tuple[WorkerState, ...]:
        nothing = [None] * len(_WORKER_FIELDS)
        replies = self.replies(
            names,
            lambda name: [
                ("hmget", WORKER_PREFIX + name, nothing, *_WORKER_FIELDS),
                ("get", keys.worker(name), None),
            ],
        )
        states = []
        for name, (fields, raw) in zip(names, replies, strict=True):
            record = dict(zip(_WORKER_FIELDS, fields, strict=True))
            # RQ's list still has the names of workers whose hashes have expired.
            if (raw or record["birth"]) and not record["death"]:
                states.append(self._worker(name, record, raw))
        return tuple(states)

    def _worker(self, name: str, record: Mapping[str, bytes | None], raw: bytes | None) -> WorkerState:
        report = None
        if raw is not None:
            try:
                report = WorkerReport.read_json(raw, "the report")
            except WireError as error:
                self.note(keys.worker(name), error)
        state: WorkerStateName = "idle"
        if raw is None:
            state = "lost" if record[SCORING_FIELD] else "foreign"
        elif report and report.drained:
            state = "draining" if report.claimed_jobs else "drained"
        elif record["state"] == b"busy":
            state = "busy"
        key = WORKER_PREFIX + name
        queues = self.text(record["queues"] or b"", key) or ""
        return WorkerState(
            name=name,
            queues=tuple(filter(None, queues.split(","))),
            state=state,
            beat_seconds=self.age(report.beat if report else self.time(record["last_heartbeat"], key)),
            report=report,
            host=self.text(record["hostname"] or b"", key) or None,
            pid=int(pid) if (pid := record["pid"]) and pid.isdigit() else None,
        )

    def _queues(
        self, known: Iterable[str], used: Iterable[str], workers: Sequence[WorkerState]
    ) -> tuple[QueueState, ...]:
        """Return the states of the queues in use: those in `used`, those on which ScoringWorkers of `workers`
        listen, and those in `known` that have jobs.

        Failed jobs do not count here. If RQ workers of another class listen on any other queue, it is left
        out, because it belongs to another application.
        """
        listed = {*used, *(name for each in workers if each.state != "foreign" for name in each.queues)}
        of_others = {name for worker in workers for name in worker.queues} - listed
        names = sorted({*known, *listed} - of_others)
        counts = self.replies(
            names,
            lambda name: [
                ("llen", _QUEUE_PREFIX + name, 0),
                ("lindex", _QUEUE_PREFIX + name, None, 0),
                ("get", keys.waits(name), None),
                ("zrange", keys.turns(name, "request"), (), 0, _LOOK_AT - 1),
                ("zrange", keys.turns(name, "bulk"), (), 0, _LOOK_AT - 1),
                ("zcard", StartedJobRegistry.key_template.format(name), 0),
                ("zcard", FailedJobRegistry.key_template.format(name), 0),
            ],
        )
        firsts = self._next_jobs(names, counts)
        created = self.replies(firsts, lambda jobs: [("hget", job, None, "created_at") for job in jobs])
        in_use = []
        for name, (in_rq, _, in_lists, _, _, started, failed), jobs, raws in zip(
            names, counts, firsts, created, strict=True
        ):
            waiting = in_rq + self.number(in_lists, keys.waits(name))
            times = [self.time(raw, job) for job, raw in zip(jobs, raws, strict=True)]
            states = [worker.state for worker in workers if name in worker.queues]
            state = QueueState(
                name=name,
                waiting=waiting,
                oldest_seconds=self.age(min(filter(None, times), default=None)),
                started=started,
                failed=failed,
                workers=sum(state in {"idle", "busy"} for state in states),
                drained=sum(state in DRAINED for state in states),
            )
            if waiting or started or name in listed:
                in_use.append(state)
        return tuple(in_use)

    def _next_jobs(self, queues: Sequence[str], counts: Sequence[list[Any]]) -> list[list[str]]:
        """Return for each queue the keys of the first jobs of its waiting lists.

        At most `_LOOK_AT` tenants of a queue, and `_LOOK_AT` runs of each tenant, are looked at.
        """
        scopes = [
            (queue, f"bulk:{tenant}")
            for queue, (*_, bulk, _, _) in zip(queues, counts, strict=True)
            for tenant in self.texts(bulk, keys.turns(queue, "bulk"))
        ]
        runs = self.replies(scopes, lambda scope: [("zrange", keys.turns(*scope), (), 0, _LOOK_AT - 1)])
        lists: dict[str, list[str]] = {queue: [] for queue in queues}
        for queue, (_, _, _, requests, *_) in zip(queues, counts, strict=True):
            for tenant in self.texts(requests, keys.turns(queue, "request")):
                lists[queue].append(keys.waiting_requests(queue, tenant))
        for (queue, scope), (turns,) in zip(scopes, runs, strict=True):
            lists[queue] += [keys.waiting(queue, run) for run in self.texts(turns, keys.turns(queue, scope))]
        replies = self.replies(queues, lambda queue: [("lindex", name, None, 0) for name in lists[queue]])
        found_jobs = []
        for queue, (_, in_rq, *_), ids in zip(queues, counts, replies, strict=True):
            named = zip([_QUEUE_PREFIX + queue, *lists[queue]], [in_rq, *ids], strict=True)
            found_jobs.append([Job.key_for(self.text(raw, name) or "") for name, raw in named if raw])
        return found_jobs

    def _runs(self, ids: list[str]) -> tuple[RunState, ...]:
        replies = self.replies(
            ids, lambda run_id: [("hgetall", keys.run(run_id), {}), ("get", keys.progress(run_id), None)]
        )
        runs = []
        for run_id, (raw, progress) in zip(ids, replies, strict=True):
            if not raw:
                continue  # the run has ended since the list was read
            try:
                runs.append(self._run(run_id, raw, self._progress(run_id, progress)))
            except (WireError, ArithmeticError, ValidationError) as error:
                self.note(keys.run(run_id), error)
        waiting = self._waiting([run for run in runs if priority_of(run.id) == "bulk"])
        return tuple(run.model_copy(update={"waiting": waiting[run.id]}) for run in runs)

    def _waiting(self, runs: list[RunState]) -> Counter[str]:
        """Count the waiting chunks of each run in `runs`.

        Some chunks wait in RQ's list of a queue's jobs, not in the run's own list. These count only if they
        are among the first `_LOOK_AT` jobs of RQ's list.
        """
        queues = sorted({run.queue for run in runs})
        own: list[tuple[Any, ...]] = [("llen", keys.waiting(run.queue, run.id), 0) for run in runs]
        of_rq = [("lrange", _QUEUE_PREFIX + name, (), 0, _LOOK_AT - 1) for name in queues]
        replies = [reply for (reply,) in self.replies([*own, *of_rq], lambda command: [command])]
        counts = Counter(dict(zip([run.id for run in runs], replies[: len(runs)], strict=True)))
        for name, ids in zip(queues, replies[len(runs) :], strict=True):
            jobs = map(keys.parse_job_id, self.texts(ids, _QUEUE_PREFIX + name))
            counts.update(job[0] for job in jobs if job and job[0] in counts)
        return counts

    def _progress(self, run_id: str, raw: bytes | None) -> Progress:
        if raw is not None:
            try:
                return Progress.read_json(raw, "the progress")
            except WireError as error:
                self.note(keys.progress(run_id), error)
        return Progress()

    def _run(self, run_id: str, raw: Mapping[bytes, bytes], progress: Progress) -> RunState:
        run = read_run(run_id, raw)
        return RunState(
            id=run.id,
            queue=run.queue,
            model=run.spec.model,
            created=run.created,
            rows=run.rows,
            rows_done=progress.rows,
            row_errors=progress.row_errors,
            rows_per_second=progress.rows_per_second(self.now),
            seconds_left=progress.seconds_left(run.rows, self.now),
            quiet_seconds=max(self.now - (progress.at or run.created), 0.0),
        )


def _memory(client: redis.Redis) -> ServerMemory | None:
    try:
        told = cast("Mapping[str, Any]", client.info())
        return ServerMemory(
            used=told["used_memory"],
            limit=told["maxmemory"],
            policy=told["maxmemory_policy"],
            evicted=told["evicted_keys"],
        )
    except (redis.ResponseError, KeyError, ValidationError):
        return None


def _compared(workers: tuple[WorkerState, ...]) -> tuple[WorkerState, ...]:
    paces: dict[object, list[float]] = {}
    for worker in workers:
        if (report := worker.report) and report.pace is not None:
            paces.setdefault((report.device, report.models), []).append(report.pace)

    def compared(worker: WorkerState) -> WorkerState:
        if not (report := worker.report) or report.pace is None:
            return worker
        alike = paces[report.device, report.models]
        usual = median(alike) if len(alike) > 2 else max(alike)
        relative = report.pace / usual if len(alike) > 1 and usual else None
        return worker.model_copy(update={"relative_pace": relative})

    return tuple(map(compared, workers))


def _names(full_names: Iterable[str], prefix: str) -> list[str]:
    return sorted(name.removeprefix(prefix) for name in full_names)
