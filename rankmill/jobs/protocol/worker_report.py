"""The workers in RQ's list of a queue, and the reports of the ScoringWorkers among them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import redis
from pydantic import Field
from redis.client import Pipeline

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import Count, Seconds, WireModel
from rankmill.jobs.protocol.latest import LatestEntries
from rankmill.jobs.protocol.leases import UNRENEWED_SECONDS
from rankmill.jobs.protocol.orders import Answer
from rankmill.jobs.protocol.rq import WORKER_PREFIX, workers_of
from rankmill.jobs.runtime.patience import cannot_serve


@dataclass(frozen=True)
class QueueWorkers:
    """Names of a queue's live ScoringWorkers, and of the ``other`` live workers, which cannot score."""

    scoring: frozenset[str]
    other: frozenset[str]

    @property
    def only_plain(self) -> bool:
        return bool(self.other) and not self.scoring


Share = Annotated[float, Field(ge=0, le=1)]

SCORING_FIELD = "scoring"
"""Field in RQ's hash of a worker that marks a ScoringWorker. The hash outlives the worker by minutes."""

Doing = Literal["", "loading", "proving"]
"""Why a worker does not score yet: it loads a model, or compares a new model's scores with a reference."""

STAGES = ("wait", "fetch", "tokenize", "forward", "write")
"""The stages in which a worker spends its time: waiting for work, and then the stages of a chunk in order."""

LATENCY_BUCKETS = (
    *(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 3.5, 5, 7.5, 10, 15, 20),
    *(30, 45, 60, 75, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200),
    *(10800, 14400, 21600, 28800, 43200, 86400),
)
"""Upper bounds in seconds of the time from a chunk's submission to its result."""


LatencyCounts = Annotated[
    tuple[Count, ...], Field(min_length=len(LATENCY_BUCKETS) + 1, max_length=len(LATENCY_BUCKETS) + 1)
]


class GpuReport(WireModel):
    """The state of a worker's GPU: share of time in which it is busy, memory in bytes, and temperature.

    Everything that uses the GPU counts, not only this worker. ``None`` means unknown.
    """

    use: Share | None
    memory_used: Count
    memory_size: Count
    celsius: float | None


class WorkerReport(WireModel):
    """The state of a ScoringWorker, written with every heartbeat; counts are since the worker's start.

    Attributes
    ----------
    started, beat
        Times of the start and of the latest heartbeat, in seconds since 1970.
    metrics_url
        Address of the metrics for Prometheus; ``None`` without metrics.
    models
        Names of the loaded models.
    refusals
        Reasons why the worker leaves some models or runs to other workers now.
    drained
        Whether the worker takes no new chunks.
    doing, doing_words
        Why the worker does not score yet: as a key, and in words. The words name the model, the device and,
        if it is known, the time left.
    pace
        Recent speed of the model's computations, in padded tokens per second; ``None`` if they took less than
        a second.
    answers
        The worker's answers to the latest orders of operators.
    claim_ahead
        Pairs that the worker claims ahead.
    cpu
        Mean number of CPU cores that the worker kept busy in the last seconds.
    gpu
        The GPU; ``None`` without an NVIDIA GPU.
    model_hits
        Number of chunks whose model was already loaded.
    stage_seconds
        Seconds of each of `STAGES`.
    latency_counts, request_latency_counts
        For each of `LATENCY_BUCKETS`, the number of all chunks, and of the chunks of requests. The last value
        counts chunks that are slower than all buckets.
    """

    device: str
    started: Seconds
    beat: Seconds
    metrics_url: str | None = None
    models: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    drained: bool = False
    doing: Doing = ""
    doing_words: str = ""
    pace: Annotated[float, Field(ge=0)] | None = None
    answers: tuple[Answer, ...] = ()
    resident_bytes: Count = 0
    claim_ahead: Count = 0
    cpu: Annotated[float, Field(ge=0)] | None = None
    gpu: GpuReport | None = None
    model_hits: Count = 0
    model_loads: Count = 0
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
    latency_counts: LatencyCounts = (0,) * (len(LATENCY_BUCKETS) + 1)
    request_latency_counts: LatencyCounts = (0,) * (len(LATENCY_BUCKETS) + 1)


class LastReport(WireModel):
    """The last report of a worker that stopped because it computed wrong scores.

    Attributes
    ----------
    at
        Seconds since 1970.
    runs
        Runs that got scores from the worker after its last successful check; at most 100 runs.
    """

    worker: str
    at: Seconds
    reason: str
    runs: tuple[str, ...]


LAST_REPORTS = LatestEntries(keys.last_reports(), LastReport)


def announce_worker(client: redis.Redis | Pipeline, name: str, report: WorkerReport, ttl: int) -> None:
    """Write the report of ScoringWorker `name`; it expires after `ttl` seconds."""
    client.set(keys.worker(name), report.written(), ex=ttl)


def bound_reports(client: redis.Redis, queue: str, seconds: int) -> None:
    """Shorten the expiry of reports that would last too long, because the server's clock has jumped back."""
    names, longest = listed_workers(client, queue), max(seconds, UNRENEWED_SECONDS)
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.ttl(keys.worker(name))
        for name, remaining in zip(names, pipe.execute(), strict=True):
            if remaining > longest:
                pipe.expire(keys.worker(name), longest)
        pipe.execute()


def listed_workers(client: redis.Redis, queue: str) -> list[str]:
    """Return the names in RQ's list of a queue's workers, including dead workers.

    RQ's own function for this is not used, because it fails at names that are not UTF-8.
    """
    listed = cast("set[bytes]", client.smembers(workers_of(queue)))
    return [key.decode(errors="backslashreplace").removeprefix(WORKER_PREFIX) for key in listed]


def queue_workers(client: redis.Redis, queue: str) -> QueueWorkers:
    """Return the live workers that listen on `queue`, by kind."""
    connection: Any = client
    names = listed_workers(client, queue)
    with connection.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.exists(WORKER_PREFIX + name)
            pipe.exists(keys.worker(name))
        flags = pipe.execute()
    alive = {name: bool(ours) for name, rq, ours in zip(names, flags[::2], flags[1::2], strict=True) if rq}
    return QueueWorkers(
        scoring=frozenset(name for name, ours in alive.items() if ours),
        other=frozenset(name for name, ours in alive.items() if not ours and not _died(connection, name)),
    )


def worker_doings(client: redis.Redis, names: Iterable[str]) -> dict[Doing, str]:
    """Return what these workers do before they can score, such as loading a model.

    The result has, for each kind of activity, the longest description that any of the workers has reported.
    """
    reports = [report for report in known_reports(client, names).values() if report and report.doing]
    reports.sort(key=lambda report: len(report.doing_words))  # longer texts also say the time left
    return {report.doing: report.doing_words for report in reports}


def _died(client: Any, name: str) -> bool:
    """Return whether a listed worker that has no report is dead.

    The worker is dead if its hash marks a ScoringWorker, because live ScoringWorkers have reports. The worker
    also counts as dead if the hash has no time of birth: then the worker has ended, or the server has lost
    the hash.
    """
    try:
        born, mark = client.hmget(WORKER_PREFIX + name, "birth", SCORING_FIELD)
    except redis.ResponseError as error:  # the key is damaged
        if cannot_serve(error):
            raise
        return False
    return born is None or mark is not None


def known_reports(client: redis.Redis, names: Iterable[str]) -> dict[str, WorkerReport | None]:
    """Return the reports of the live ScoringWorkers among `names`. A report that cannot be read is
    ``None``.
    """
    wanted = list(names)
    raw = cast("list[bytes | None]", client.mget([keys.worker(name) for name in wanted])) if wanted else []
    reports: dict[str, WorkerReport | None] = {}
    for name, report in zip(wanted, raw, strict=True):
        if report is not None:
            reports[name] = None
            with suppress(WireError):  # the report may have another format
                reports[name] = WorkerReport.read_json(report, f"the report of worker {name}")
    return reports


def worker_reports(client: redis.Redis, names: Iterable[str]) -> dict[str, WorkerReport]:
    """Return the reports of the live ScoringWorkers among `names`, without reports that cannot be read."""
    return {name: report for name, report in known_reports(client, names).items() if report}


def taking_workers(client: redis.Redis, scoring: Iterable[str]) -> frozenset[str]:
    """Return the live workers among `scoring` that take new chunks. Only drained workers take none."""
    reports = known_reports(client, sorted(scoring))
    return frozenset(name for name, report in reports.items() if not (report and report.drained))
