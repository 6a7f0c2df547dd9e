"""The cluster's metrics, as Redis knows it, and where Prometheus finds the workers'."""

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

from jobs.runtime.http import answer, paths
from jobs.runtime.passwords import mask_passwords
from jobs.worker_report import WorkerReport
from rankmill.cluster.dashboard import page_apps
from rankmill.cluster.snapshot import Cluster, read_cluster

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

_CACHE_SECONDS = 1
"""Whoever asks again so soon gets the same answer, and Redis is left in peace."""

_STATES = ("idle", "busy", "lost", "foreign")
_COUNTED = ("chunks", "retried_chunks", "pairs", "row_errors")
"""Fields of a `WorkerReport` that are added up."""

logger = logging.getLogger(__name__)


def exporter_app(client: redis.Redis) -> WSGIApplication:
    """Serves ``/metrics``, ``/sd`` and ``/healthz``, and the live page at ``/``.

    Parameters
    ----------
    client
        The server, by an `jobs.runtime.connection.impatient` client: it may be away at any time.
    """
    view = ClusterView(client)

    def targets() -> tuple[HTTPStatus, str]:
        cluster = view.look()
        if cluster is None:  # Prometheus keeps to the targets it had
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


def discovery(cluster: Cluster) -> list[dict[str, list[str]]]:
    """Where the live workers serve their metrics, as Prometheus wants to be told."""
    found = []
    for worker in cluster.workers:
        with suppress(ValueError):  # a damaged report may have anything there
            found.append(urlsplit(worker.report.metrics_url or "").netloc if worker.report else "")
    return [{"targets": sorted(filter(None, found))}]


class ClusterView:
    """The cluster as it was less than a second ago; safe to share between threads."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._seen: Cluster | None = None
        self._until = 0.0
        self._away = False

    def look(self) -> Cluster | None:
        """The cluster, or ``None`` while Redis does not answer."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._seen = self._read()
                self._until = time.monotonic() + _CACHE_SECONDS
            return self._seen

    def _read(self) -> Cluster | None:
        try:
            found = read_cluster(self._client, page_size=0)
        except (redis.RedisError, OSError) as error:
            if not self._away:
                logger.warning("Redis does not answer: %s", mask_passwords(" ".join(str(error).split())))
            self._away = True
            return None
        self._away = False
        return found


class ClusterMetrics(Collector):
    """Reads the cluster when Prometheus asks; without Redis there is ``rankmill_redis_up 0`` alone."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._reports: dict[str, WorkerReport] = {}
        self._total: Counter[str] = Counter()

    def describe(self) -> Iterable[Metric]:
        """All metrics, without a look at Redis."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """All metrics with their values."""
        cluster = self._view.look()
        families = _families()
        families["rankmill_redis_up"].add_metric([], cluster is not None)
        if cluster is not None:
            _fill(families, cluster)
            self._count(cluster)
            for field in _COUNTED:
                families[f"rankmill_cluster_{field}"].add_metric([], self._total[field])
        return families.values()

    def _count(self, cluster: Cluster) -> None:
        """Add what each worker has done since the last look: a worker that ends takes nothing along."""
        with self._lock:
            reports = {worker.name: worker.report for worker in cluster.workers if worker.report}
            for name, report in reports.items():
                before = self._reports.get(name)
                for field in _COUNTED:
                    done, known = getattr(report, field), getattr(before, field) if before else 0
                    self._total[field] += done - known if done >= known else done  # less: begun anew
            self._reports = reports


def _fill(families: dict[str, GaugeMetricFamily | CounterMetricFamily], cluster: Cluster) -> None:
    beats: dict[str, float] = {}
    lost = Counter[str]()
    for worker in cluster.workers:
        if worker.state == "lost":
            lost.update(worker.queues)
        if worker.state in {"idle", "busy", "lost"} and worker.beat_seconds is not None:
            for name in worker.queues:
                beats[name] = max(beats.get(name, 0.0), worker.beat_seconds)
    for queue in cluster.queues:
        for state, jobs in (("waiting", queue.waiting), ("started", queue.started), ("failed", queue.failed)):
            families["rankmill_queue_jobs"].add_metric([queue.name, state], jobs)
        families["rankmill_queue_oldest_job_age_seconds"].add_metric([queue.name], queue.oldest_seconds or 0)
        families["rankmill_queue_workers"].add_metric([queue.name], queue.workers)
        families["rankmill_queue_lost_workers"].add_metric([queue.name], lost[queue.name])
        families["rankmill_queue_heartbeat_age_seconds"].add_metric([queue.name], beats.get(queue.name, 0))
    states = Counter[str](worker.state for worker in cluster.workers)
    for state in _STATES:
        families["rankmill_workers"].add_metric([state], states[state])
    families["rankmill_runs_active"].add_metric([], cluster.runs_total)
    families["rankmill_redis_writable"].add_metric([], cluster.trouble is None)
    families["rankmill_jobs_set_aside"].add_metric([], len(cluster.set_aside))


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """Each metric by its name, empty."""
    gauges = {
        "rankmill_redis_up": ("1 if Redis answers, else 0; then there is none of the others.", ()),
        "rankmill_queue_jobs": (
            "Chunks of a queue: waiting, started, failed (for good).",
            ("queue", "state"),
        ),
        "rankmill_queue_oldest_job_age_seconds": (
            "Age of the chunk that is next in the queue, 0 if none waits.",
            ("queue",),
        ),
        "rankmill_queue_workers": ("Live ScoringWorkers that listen on the queue.", ("queue",)),
        "rankmill_queue_lost_workers": (
            "ScoringWorkers of the queue that have not beaten for their lease (lease_seconds).",
            ("queue",),
        ),
        "rankmill_queue_heartbeat_age_seconds": (
            "The longest that any ScoringWorker of the queue has not beaten, 0 without workers.",
            ("queue",),
        ),
        "rankmill_workers": (
            "Workers by state: idle, busy, lost (a ScoringWorker that has not beaten for its lease), "
            "foreign (an RQ worker that cannot score).",
            ("state",),
        ),
        "rankmill_runs_active": ("Runs that are not finished.", ()),
        "rankmill_redis_writable": (
            "1 if Redis takes writes, else 0: it is full, say, or a replica, and everybody waits.",
            (),
        ),
        "rankmill_jobs_set_aside": ("Jobs that could not be read, in the last week; at most 100.", ()),
    }
    counters = {
        "rankmill_cluster_chunks": "Chunks scored by all workers, as their heartbeats say.",
        "rankmill_cluster_retried_chunks": "Chunks that workers claimed after an attempt that had failed.",
        "rankmill_cluster_pairs": "Pairs that went through the models of all workers.",
        "rankmill_cluster_row_errors": "Pairs that got an error instead of a score.",
    }
    return {
        **{name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in gauges.items()},
        **{name: CounterMetricFamily(name, text, labels=()) for name, text in counters.items()},
    }
