"""The exporter: metrics of the cluster from Redis, and the addresses of the workers' own metrics."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import redis
from prometheus_client import CollectorRegistry, Info, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankmill.cluster.backlog import RUNS, Backlogs
from rankmill.cluster.dashboard import page_apps
from rankmill.cluster.snapshot import Snapshot, read_cluster
from rankmill.jobs.protocol.worker_report import WorkerReport
from rankmill.jobs.runtime.http import answer, paths
from rankmill.jobs.runtime.passwords import mask_passwords

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

_CACHE_SECONDS = 1
"""Requests within this time get the same snapshot, so that they put no load on Redis."""

_STATES = ("idle", "busy", "draining", "drained", "lost", "foreign")
_COUNTED = ("chunks", "retried_chunks", "pairs", "row_errors")
"""Fields of a `WorkerReport` that are added up."""

logger = logging.getLogger(__name__)


def exporter_app(client: redis.Redis) -> WSGIApplication:
    """The application that serves ``/metrics``, ``/sd`` and ``/healthz``, and the live page at ``/``.

    Parameters
    ----------
    client
        Client of the server from `jobs.runtime.connection.impatient`: it does not wait for the server.
    """
    view = ClusterView(client)

    def targets() -> tuple[HTTPStatus, str]:
        cluster = view.look()
        if cluster is None:  # after a 503 Prometheus keeps its targets
            return HTTPStatus.SERVICE_UNAVAILABLE, "Redis does not answer"
        return HTTPStatus.OK, json.dumps(discovery(cluster))

    return paths(
        {
            "/metrics": make_wsgi_app(exporter_registry(view)),
            "/sd": answer(targets, "application/json"),
            "/healthz": answer(lambda: (HTTPStatus.OK, "alive")),
            **page_apps(client),
        }
    )


def exporter_registry(view: ClusterView) -> CollectorRegistry:
    """All metrics of the exporter: the cluster's and its own."""
    registry = CollectorRegistry()
    registry.register(ClusterMetrics(view))
    build = Info("rankmill_exporter_build", "Version of rankmill.", registry=registry)
    build.info({"version": importlib.metadata.version("rankmill")})
    ProcessCollector(registry=registry)
    return registry


def discovery(cluster: Snapshot) -> list[dict[str, list[str]]]:
    """Addresses of the live workers' metrics, in the format of Prometheus' HTTP service discovery."""
    found = []
    for worker in cluster.workers:
        with suppress(ValueError):  # a damaged report may have any text there
            found.append(urlsplit(worker.report.metrics_url or "").netloc if worker.report else "")
    return [{"targets": sorted(filter(None, found))}]


class ClusterView:
    """A snapshot that is less than a second old; threads may share the object."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._seen: Snapshot | None = None
        self._until = 0.0
        self._away = False

    def look(self) -> Snapshot | None:
        """The snapshot; ``None`` while Redis does not answer."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._seen = self._read()
                self._until = time.monotonic() + _CACHE_SECONDS
            return self._seen

    def _read(self) -> Snapshot | None:
        try:
            found = read_cluster(self._client, page_size=RUNS)
        except (redis.RedisError, OSError) as error:
            if not self._away:
                logger.warning("Redis does not answer: %s", mask_passwords(" ".join(str(error).split())))
            self._away = True
            return None
        self._away = False
        return found


class ClusterMetrics(Collector):
    """Reads the cluster for each scrape; while Redis is away, there is only ``rankmill_redis_up 0``."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._reports: dict[str, WorkerReport] = {}
        self._total: Counter[str] = Counter()
        self._backlogs = Backlogs()

    def describe(self) -> Iterable[Metric]:
        """All metrics without values; does not read Redis."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """All metrics with their values."""
        cluster = self._view.look()
        families = _families()
        families["rankmill_redis_up"].add_metric([], cluster is not None)
        if cluster is not None:
            _fill(families, cluster)
            for name, backlog in self._backlogs.of(cluster).items():
                families["rankmill_queue_backlog_pairs"].add_metric([name], backlog.pairs)
                if backlog.seconds is not None:
                    families["rankmill_queue_backlog_seconds"].add_metric([name], backlog.seconds)
            self._count(cluster)
            for field in _COUNTED:
                families[f"rankmill_cluster_{field}"].add_metric([], self._total[field])
        return families.values()

    def _count(self, cluster: Snapshot) -> None:
        """Add each worker's increase since the last scrape, so that totals do not fall when a worker ends."""
        with self._lock:
            reports = {worker.name: worker.report for worker in cluster.workers if worker.report}
            for name, report in reports.items():
                before = self._reports.get(name)
                for field in _COUNTED:
                    done, known = getattr(report, field), getattr(before, field) if before else 0
                    self._total[field] += (
                        done - known if done >= known else done
                    )  # a smaller value: a new process
            self._reports = reports


def _fill(families: dict[str, GaugeMetricFamily | CounterMetricFamily], cluster: Snapshot) -> None:
    beats: dict[str, float] = {}
    lost = Counter[str]()
    for worker in cluster.workers:
        if worker.state == "lost":
            lost.update(worker.queues)
        if worker.state != "foreign" and worker.beat_seconds is not None:
            for name in worker.queues:
                beats[name] = max(beats.get(name, 0.0), worker.beat_seconds)
    for queue in cluster.queues:
        for state, jobs in (("waiting", queue.waiting), ("started", queue.started), ("failed", queue.failed)):
            families["rankmill_queue_jobs"].add_metric([queue.name, state], jobs)
        families["rankmill_queue_oldest_job_age_seconds"].add_metric([queue.name], queue.oldest_seconds or 0)
        families["rankmill_queue_workers"].add_metric([queue.name], queue.workers)
        families["rankmill_queue_drained_workers"].add_metric([queue.name], queue.drained)
        families["rankmill_queue_lost_workers"].add_metric([queue.name], lost[queue.name])
        families["rankmill_queue_heartbeat_age_seconds"].add_metric([queue.name], beats.get(queue.name, 0))
    for files in cluster.file_queues:
        for state, runs in (("waiting", files.waiting), ("running", files.running)):
            families["rankmill_submitted_runs"].add_metric([files.name, state], runs)
        families["rankmill_runners"].add_metric([files.name], files.runners)
        families["rankmill_webhooks_due"].add_metric([files.name], files.webhooks)
    states = Counter[str](worker.state for worker in cluster.workers)
    for state in _STATES:
        families["rankmill_workers"].add_metric([state], states[state])
    families["rankmill_runs_active"].add_metric([], cluster.runs_total)
    families["rankmill_redis_writable"].add_metric([], cluster.trouble is None)
    families["rankmill_jobs_set_aside"].add_metric([], len(cluster.set_aside))


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """The metrics without values, by name."""
    gauges = {
        "rankmill_redis_up": ("1 if Redis answers, else 0; then the other metrics are absent.", ()),
        "rankmill_queue_jobs": (
            "Chunks of a queue: waiting, started, failed (for good).",
            ("queue", "state"),
        ),
        "rankmill_queue_oldest_job_age_seconds": (
            "Age of the next chunk in the queue, 0 if none waits.",
            ("queue",),
        ),
        "rankmill_queue_workers": ("Live ScoringWorkers that take the queue's chunks.", ("queue",)),
        "rankmill_queue_drained_workers": (
            "Live ScoringWorkers of the queue that are drained and take no chunks.",
            ("queue",),
        ),
        "rankmill_queue_lost_workers": (
            "ScoringWorkers of the queue without a heartbeat for longer than their lease (lease_seconds).",
            ("queue",),
        ),
        "rankmill_queue_heartbeat_age_seconds": (
            "Largest age of the last heartbeat among the queue's ScoringWorkers, 0 without workers.",
            ("queue",),
        ),
        "rankmill_queue_backlog_pairs": (
            "Pairs of the queue without a result, also those not submitted yet where a run's total is known.",
            ("queue",),
        ),
        "rankmill_queue_backlog_seconds": (
            "Time that the queue's live workers need for those pairs, by their speed so far.",
            ("queue",),
        ),
        "rankmill_workers": (
            "Workers by state: idle, busy, draining (finishing its last chunks), drained, lost (a "
            "ScoringWorker without a heartbeat for its lease), foreign (an RQ worker that cannot score).",
            ("state",),
        ),
        "rankmill_submitted_runs": ("Submitted runs that are not finished.", ("queue", "state")),
        "rankmill_runners": ("Live runners of a queue of submitted runs.", ("queue",)),
        "rankmill_webhooks_due": ("Webhooks of ended runs that are not delivered yet.", ("queue",)),
        "rankmill_runs_active": ("Runs that are not finished.", ()),
        "rankmill_redis_writable": (
            "1 if Redis takes writes, else 0 (for example full, or a replica); all processes wait for it.",
            (),
        ),
        "rankmill_jobs_set_aside": ("Jobs that could not be read, in the last week; at most 100.", ()),
    }
    counters = {
        "rankmill_cluster_chunks": "Chunks scored by all workers, from their heartbeats' reports.",
        "rankmill_cluster_retried_chunks": "Chunks that workers claimed after a failed attempt.",
        "rankmill_cluster_pairs": "Pairs that went through the models of all workers.",
        "rankmill_cluster_row_errors": "Pairs that got an error instead of a score.",
    }
    return {
        **{name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in gauges.items()},
        **{name: CounterMetricFamily(name, text, labels=()) for name, text in counters.items()},
    }
