"""Serves metrics of the cluster, read from Redis, and the addresses of the workers' own metrics."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import get_args
from urllib.parse import urlsplit
from wsgiref.types import WSGIApplication

import redis
from prometheus_client import CollectorRegistry, Info, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankmill.cluster.backlog import RUNS, Backlog, Backlogs
from rankmill.cluster.snapshot import Snapshot, WorkerStateName, read_cluster
from rankmill.cluster.usage import UsageMetrics
from rankmill.cluster.verdict import fault_kinds, verdict
from rankmill.cluster.watch import Gauge, ask_extensions, checked_gauges, watches
from rankmill.jobs.protocol.accounts import Entry, read_accounts
from rankmill.jobs.protocol.worker_report import WorkerReport
from rankmill.jobs.runtime.http import answer, paths
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_CACHE_SECONDS = 1
"""All HTTP requests within this many seconds are answered from one snapshot of the cluster, to spare
Redis.
"""

_REMEMBERED_SECONDS = 86400
"""The exporter remembers the last report of a worker for this many seconds after the worker's last
heartbeat.
"""

_UP = ("rankmill_redis_up", "1 if Redis answers, else 0; then the other metrics are absent.")
_JOBS = ("waiting", "started", "failed")
_COUNTED = {
    "chunks": "Chunks scored by all workers, from their heartbeats' reports.",
    "retried_chunks": "Chunks that workers claimed after a failed attempt.",
    "pairs": "Pairs that went through the models of all workers.",
    "row_errors": "Pairs that got an error instead of a score.",
}
"""Fields of `WorkerReport` that the exporter sums over all workers, and the help texts of their metrics."""

logger = logging.getLogger(__name__)


def exporter_app(client: redis.Redis, settings: Settings) -> WSGIApplication:
    """Make the exporter's WSGI application.

    It serves ``/metrics``, ``/sd`` with the addresses of the workers' own metrics, ``/healthz``, and the
    pages that extensions add.

    Parameters
    ----------
    client
        A client from `jobs.runtime.connection.impatient`, which does not wait for the server.
    settings
        The settings, which extensions get for their pages.
    """
    view = ClusterView(client)

    def targets() -> tuple[HTTPStatus, str]:
        cluster = view.look()
        if cluster is None:  # Prometheus keeps its targets after a 503
            return HTTPStatus.SERVICE_UNAVAILABLE, "Redis does not answer"
        return HTTPStatus.OK, json.dumps(discovery(cluster))

    pages = ask_extensions(lambda watch: dict(watch.pages(client, settings)))
    added = {path: app for more in pages for path, app in more.items()}
    return paths(
        {
            **added,
            "/metrics": make_wsgi_app(exporter_registry(view)),
            "/sd": answer(targets, "application/json"),
            "/healthz": answer(lambda: (HTTPStatus.OK, "alive")),
        }
    )


def exporter_registry(view: ClusterView) -> CollectorRegistry:
    """Return a registry of all metrics that the exporter serves."""
    registry = CollectorRegistry()
    registry.register(ClusterMetrics(view))
    build = Info("rankmill_exporter_build", "Version of rankmill.", registry=registry)
    build.info({"version": importlib.metadata.version("rankmill")})
    ProcessCollector(registry=registry)
    return registry


def discovery(cluster: Snapshot) -> list[dict[str, list[str]]]:
    """Return the addresses of the live workers' metrics in the form of Prometheus' HTTP service discovery."""
    addresses = []
    for worker in cluster.workers:
        with suppress(ValueError):  # `metrics_url` may be any text, and `urlsplit` refuses some
            addresses.append(urlsplit(worker.report.metrics_url or "").netloc if worker.report else "")
    return [{"targets": sorted(filter(None, addresses))}]


class ClusterView:
    """Reads snapshots of the cluster from Redis, at most about one in a second. Threads may share a view."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._lock = system.Lock()
        self._seen: Snapshot | None = None
        self._until = 0.0
        self._away = False

    def look(self) -> Snapshot | None:
        """Return a snapshot of the cluster, at most about 1 s old, or ``None`` while Redis does not
        answer.
        """
        with self._lock:
            if system.monotonic() >= self._until:
                self._seen = self._read()
                self._until = system.monotonic() + _CACHE_SECONDS
            return self._seen

    def usage(self) -> list[Entry] | None:
        try:
            return read_accounts(self._client, 2)
        except (redis.RedisError, OSError):
            return None

    def _read(self) -> Snapshot | None:
        try:
            cluster = read_cluster(self._client, page_size=RUNS)
        except (redis.RedisError, OSError) as error:
            if not self._away:
                logger.warning("Redis does not answer: %s", mask_passwords(" ".join(str(error).split())))
            self._away = True
            return None
        if self._away:
            logger.info("Redis answers again")
        self._away = False
        return cluster


class ClusterMetrics(Collector):
    """Makes Prometheus metrics from a snapshot of the cluster.

    While Redis does not answer, only ``rankmill_redis_up`` has a value, which is 0.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._lock = system.Lock()
        self._reports: dict[str, WorkerReport] | None = None
        self._total: Counter[str] = Counter()
        self._backlogs = Backlogs()
        self._usage = UsageMetrics()

    def describe(self) -> Iterable[Metric]:
        return [*self._families(_NOTHING), *self._usage.families(None)]

    def collect(self) -> Iterable[Metric]:
        cluster = self._view.look()
        if cluster is None:
            return [GaugeMetricFamily(*_UP, value=0)]
        self._count(cluster)
        return [*self._families(cluster), *self._usage.families(self._view.usage())]

    def _families(self, cluster: Snapshot) -> list[Metric]:
        families: list[Metric] = []
        for name, text, labels, samples in _gauges(cluster, self._backlogs.of(cluster)):
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, value in samples.items():
                family.add_metric(values, value)
            families.append(family)
        for field, text in _COUNTED.items():
            name = f"rankmill_cluster_{field}"
            families.append(CounterMetricFamily(name, text, value=self._total[field]))
        return families

    def _count(self, cluster: Snapshot) -> None:
        """Add to each total what the workers have done since the last snapshot.

        What workers did before the first snapshot is not counted. A worker that ends takes nothing away from
        a total.
        """
        with self._lock:
            reports = {worker.name: worker.report for worker in cluster.workers if worker.report}
            known = reports if self._reports is None else self._reports
            for name, report in reports.items():
                before = known.get(name)
                is_same = before is not None and before.started == report.started
                for field in _COUNTED:
                    self._total[field] += getattr(report, field) - (getattr(before, field) if is_same else 0)
            # a worker whose report has expired may be seen again
            oldest = cluster.at - _REMEMBERED_SECONDS
            kept = {name: report for name, report in known.items() if report.beat > oldest}
            self._reports = kept | reports


def _gauges(cluster: Snapshot, backlogs: Mapping[str, Backlog]) -> list[Gauge]:
    queues, states = cluster.queues, Counter(each.state for each in cluster.workers)
    lost = Counter(name for each in cluster.workers if each.state == "lost" for name in each.queues)
    faults = Counter(fault.kind for fault in verdict(cluster).faults)
    beats: dict[str, float] = {}
    for worker in cluster.workers:
        if worker.state != "foreign" and worker.beat_seconds is not None:
            for name in worker.queues:
                beats[name] = max(beats.get(name, 0.0), worker.beat_seconds)
    own = [
        (*_UP, (), {(): 1}),
        ("rankmill_queue_jobs", "Chunks of a queue: waiting, started, failed (for good).", ("queue", "state"),
         {(each.name, state): getattr(each, state) for each in queues for state in _JOBS}),
        ("rankmill_queue_oldest_job_age_seconds", "Age of the next chunk in the queue, 0 if none waits.",
         ("queue",), {(each.name,): each.oldest_seconds or 0 for each in queues}),
        ("rankmill_queue_workers", "Live ScoringWorkers that take the queue's chunks.", ("queue",),
         {(each.name,): each.workers for each in queues}),
        ("rankmill_queue_drained_workers",
         "Live ScoringWorkers of the queue that are drained and take no chunks.", ("queue",),
         {(each.name,): each.drained for each in queues}),
        ("rankmill_queue_lost_workers",
         "ScoringWorkers of the queue without a heartbeat for longer than their lease (lease_seconds).",
         ("queue",), {(each.name,): lost[each.name] for each in queues}),
        ("rankmill_queue_heartbeat_age_seconds",
         "Largest age of the last heartbeat among the queue's ScoringWorkers, 0 without workers.",
         ("queue",), {(each.name,): beats.get(each.name, 0) for each in queues}),
        ("rankmill_queue_backlog_pairs",
         "Pairs of the queue without a result, also those not submitted yet where a run's total is known.",
         ("queue",), {(name,): each.pairs for name, each in backlogs.items()}),
        ("rankmill_queue_backlog_seconds",
         "Time that the queue's live workers need for those pairs, by their speed so far.",
         ("queue",), {(name,): each.seconds for name, each in backlogs.items() if each.seconds is not None}),
        ("rankmill_workers",
         "Workers by state: idle, busy, draining (finishing its last chunks), drained, lost (a "
         "ScoringWorker without a heartbeat for its lease), foreign (an RQ worker that cannot score).",
         ("state",), {(state,): states[state] for state in get_args(WorkerStateName)}),
        ("rankmill_worker_relative_pace",
         "Tokens in a second of forward lately, over what is usual of workers with this one's device and "
         "models.", ("worker",),
         {(each.name,): each.relative_pace for each in cluster.workers if each.relative_pace is not None}),
        ("rankmill_runs_active", "Runs that are not finished, without detached ones.", (),
         {(): cluster.runs_total}),
        ("rankmill_redis_writable",
         "1 if Redis takes writes, else 0 (for example full, or a replica); all processes wait for it.",
         (), {(): cluster.trouble is None}),
        ("rankmill_redis_memory_bytes", "Memory that Redis uses, and its limit (maxmemory), if it has one.",
         ("kind",), _memory(cluster)),
        ("rankmill_workers_stopped",
         "Workers that stopped because of wrong scores: the latest 100, until none has for a week.", (),
         {(): len(cluster.last_reports)}),
        ("rankmill_faults", "What is wrong with the cluster, by kind; rankmill status says more.",
         ("kind",), {(kind,): faults[kind] for kind in fault_kinds()}),
        ("rankmill_jobs_set_aside", "Unreadable jobs: the latest 100, until there is none for a week.", (),
         {(): len(cluster.set_aside)}),
    ]  # fmt: skip
    gauges = {gauge.name: gauge for gauge in itertools.starmap(Gauge, own)}
    for extension, watch in watches().items():
        with suppress(Exception):  # an extension that fails is `Broken` in the snapshot
            for gauge in checked_gauges(cluster.extensions.get(extension, watch.nothing)):
                gauges.setdefault(gauge.name, gauge)  # of two metrics with one name, the first is served
    return list(gauges.values())


def _memory(cluster: Snapshot) -> dict[tuple[str, ...], float]:
    if cluster.memory is None:
        return {}
    sizes = {"used": cluster.memory.used, "limit": cluster.memory.limit}
    return {(kind,): size for kind, size in sizes.items() if size}


_NOTHING = Snapshot(at=0, queues=(), workers=(), runs=(), runs_total=0, page=0, page_size=0)
