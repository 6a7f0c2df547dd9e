"""Serves the live page and its data. Rates are computed from the workers' successive reports."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import numpy as np
import numpy.typing as npt
import redis
from pydantic import BaseModel, ConfigDict

from rankmill.cluster.snapshot import Snapshot, read_cluster
from rankmill.cluster.verdict import with_verdict
from rankmill.jobs.protocol.worker_report import LATENCY_BUCKETS, STAGES, WorkerReport
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.system import Periodic, system

WINDOW_SECONDS = 30

MAX_POINTS = 300

_SERIES = (
    "at", "pairs_per_second", "request_p50", "request_p95", "request_p99",
    "bulk_p50", "bulk_p95", "bulk_p99", "waiting",
)  # fmt: skip

_PAGE = Path(__file__).resolve().parent / "static"

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_LOOK_SECONDS = 2.0

_MAX_PAGE = 100_000

_HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
]
"""Headers of all HTTP answers of the live page. With them, a browser loads only this server's files, and does
not show the page in a frame of another page.
"""


class Rates(BaseModel):
    """Rates of all workers together over the last `WINDOW_SECONDS`; a rate without data is ``None``.

    ``row_errors`` is a count. ``padding`` is the share of the computed tokens that was
    padding. ``stages`` has each stage's share of the workers' time. ``request_latency`` and ``bulk_latency``
    are the percentiles 50, 95 and 99 of the seconds from a chunk's submission to its result. ``speeds`` has
    the pairs per second of each worker.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    pairs_per_second: float | None = None
    row_errors: int = 0
    padding: float | None = None
    stages: dict[str, float] | None = None
    request_latency: tuple[float, float, float] | None = None
    bulk_latency: tuple[float, float, float] | None = None
    speeds: dict[str, float] = {}


class History:
    """Keeps the figures of a cluster's last ten minutes, for the plots of the live page."""

    def __init__(self) -> None:
        self._reports: dict[str, deque[WorkerReport]] = {}
        self._points: deque[tuple[float | None, ...]] = deque(maxlen=MAX_POINTS)
        self.rates = Rates()

    def add(self, cluster: Snapshot) -> None:
        live = {worker.name: worker.report for worker in cluster.workers if worker.report}
        for gone in self._reports.keys() - live.keys():
            del self._reports[gone]
        for name, report in live.items():
            self._note(self._reports.setdefault(name, deque()), report)
        self.rates = _rates({name: (seen[0], seen[-1]) for name, seen in self._reports.items()})
        requests = self.rates.request_latency or (None, None, None)
        bulk = self.rates.bulk_latency or (None, None, None)
        waiting = sum(queue.waiting for queue in cluster.queues)
        self._points.append((cluster.at, self.rates.pairs_per_second, *requests, *bulk, waiting))

    def add_gap(self, at: float) -> None:
        self._points.append((at, *[None] * (len(_SERIES) - 1)))

    def series(self) -> dict[str, list[float | None]]:
        points = list(self._points)  # another thread may add a point meanwhile
        return {name: [point[place] for point in points] for place, name in enumerate(_SERIES)}

    def _note(self, seen: deque[WorkerReport], report: WorkerReport) -> None:
        if seen and (seen[-1].started != report.started or seen[-1].beat > report.beat):
            seen.clear()  # another process has taken over the name, or the host's clock went back
        if not seen or seen[-1].beat != report.beat:
            seen.append(report)
        while len(seen) > 2 and report.beat - seen[0].beat > WINDOW_SECONDS:
            seen.popleft()


def quantiles(counts: Sequence[int] | npt.NDArray[np.int64]) -> tuple[float, float, float] | None:
    """Estimate the quantiles 0.5, 0.95 and 0.99 of a histogram with the buckets `LATENCY_BUCKETS`.
    Interpolates within a bucket; values above all bounds count as the highest bound. Returns ``None`` if the
    histogram is empty.

    >>> quantiles([10, *[0] * 44])
    (0.005, 0.0095, 0.0099)
    """
    sums = np.cumsum([0, *counts])
    if not sums[-1]:
        return None
    bounds = [0.0, *LATENCY_BUCKETS, LATENCY_BUCKETS[-1]]
    p50, p95, p99 = np.interp(sums[-1] * np.array([0.5, 0.95, 0.99]), sums, bounds).tolist()
    return p50, p95, p99


def _rates(spans: dict[str, tuple[WorkerReport, WorkerReport]]) -> Rates:
    """Compute the rates of all workers together, from the first and the last report of each worker."""
    grown = {name: pair for name, pair in spans.items() if pair[1].beat > pair[0].beat}
    if not grown:
        return Rates()
    speeds = {name: (new.pairs - old.pairs) / (new.beat - old.beat) for name, (old, new) in grown.items()}
    both = list(grown.values())

    def growth(field: str) -> Any:
        """Return by how much a counter of the reports has grown in all workers together. If `field` is a list
        of counters, returns a list with the growth of each counter.
        """
        return np.sum(
            [np.subtract(getattr(new, field), getattr(old, field)) for old, new in both], 0
        ).tolist()

    real, padded, seconds = growth("tokens"), growth("padded_tokens"), growth("stage_seconds")
    counts = np.array(growth("latency_counts"))
    # A report may count a chunk among the chunks of requests, and not yet among all chunks, because the
    # worker goes on scoring while it writes the report.
    requests = np.minimum(growth("request_latency_counts"), counts)
    busy = sum(seconds)
    return Rates(
        pairs_per_second=sum(speeds.values()),
        row_errors=growth("row_errors"),
        padding=1 - real / padded if padded else None,
        stages={name: part / busy for name, part in zip(STAGES, seconds, strict=True)} if busy > 0 else None,
        request_latency=quantiles(requests),
        bulk_latency=quantiles(counts - requests),
        speeds=speeds,
    )


logger = logging.getLogger(__name__)


def page_apps(client: redis.Redis, *, has_admin: bool) -> dict[str, WSGIApplication]:
    """Return, by path, the WSGI apps that serve the live page, its files and its data. Also starts the thread
    that keeps the figures of the last ten minutes.

    Parameters
    ----------
    client
        A client from `jobs.runtime.connection.impatient`, whose commands do not wait for a Redis server that
        cannot serve.
    has_admin
        Whether the page asks for the admin's key.
    """
    history = History()
    Periodic("the page's history", partial(_look, client, history), _LOOK_SECONDS).start()
    names = [path.name for path in _PAGE.iterdir() if path.suffix in _TYPES]
    files = {f"/{name}": _file(_PAGE / name) for name in names}
    return {
        "/": files.pop("/index.html"),
        **files,
        "/api/cluster.json": _cluster_json(client, history, has_admin),
    }


def _look(client: redis.Redis, history: History) -> None:
    try:
        history.add(read_cluster(client))
    except Exception as error:
        history.add_gap(system.now())
        if not isinstance(error, redis.RedisError | OSError):
            raise


def _cluster_json(client: redis.Redis, history: History, has_admin: bool) -> WSGIApplication:
    """Make a WSGI app that serves the live page's data as JSON: the figures of its plots, and a snapshot of
    the cluster.

    The snapshot has one page of the list of runs, which the request chooses. If Redis cannot be read, an
    error replaces the snapshot.
    """

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        number = parse_qs(environ.get("QUERY_STRING", "")).get("page", ["0"])[0]
        page = min(int(number[:9]), _MAX_PAGE) if number.isdecimal() else 0
        answer: dict[str, object] = {"series": history.series(), "rates": history.rates.model_dump()}
        answer["has_admin"] = has_admin
        status = HTTPStatus.OK
        try:
            cluster = read_cluster(client, page=page)
            answer["cluster"] = with_verdict(cluster).model_dump()
            answer["runs"] = [run.model_dump() for seen in cluster.extensions.values() for run in seen.runs()]
            answer["lines"] = [line for seen in cluster.extensions.values() for line in seen.lines()]
        except (redis.RedisError, OSError) as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            answer["error"] = mask_passwords(" ".join(str(error).split()))
        return respond(start, status, "application/json", json.dumps(answer, allow_nan=False).encode())

    return app


def _file(path: Path) -> WSGIApplication:
    body, content_type = path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8"

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return respond(start, HTTPStatus.OK, content_type, body)

    return app


def respond(start: StartResponse, status: HTTPStatus, content_type: str, body: bytes) -> Iterable[bytes]:
    """Answer an HTTP request with `body`. Adds the headers that all answers of the live page have."""
    length = ("Content-Length", str(len(body)))
    start(f"{status.value} {status.phrase}", [("Content-Type", content_type), length, *_HEADERS])
    return [body]
