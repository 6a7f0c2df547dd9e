"""Measures the cost of metrics, by a worker that counts and is scraped beside one that does not count.

    python -m benchmarks.engine.metrics --model MODEL --pairs PAIRS.parquet

The two score the same pairs in turn, many times, each in a process of its own. The first is scraped once a
second, which is fifteen times as often as usual. On a machine with neighbours these rounds differ by far more
than metrics cost; so the counting, the report and the scrape are also timed by themselves, in CPU time, and
set against the worker's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from prometheus_client import generate_latest

from benchmarks.cluster import cluster
from rankmill import Client
from rankmill.jobs.contract.results import ChunkScores, ChunkStats
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport, queue_workers, worker_reports
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.worker import ScoringWorker

Pairs = list[tuple[str, str]]


class UncountedWorker(ScoringWorker):
    """A ScoringWorker that counts nothing and serves nothing."""

    def _prepare(self, settings: WorkerSettings) -> None:
        from prometheus_client import Counter, Histogram

        from rankmill.workers.host import metrics

        nothing = {
            (Counter, "inc"): lambda *_: None,
            (Histogram, "observe"): lambda *_: None,
            (metrics, "stage"): lambda _: nullcontext(),
            (metrics, "count_batch"): lambda *_: None,
            (metrics, "count_chunk"): lambda *_: None,
            (metrics, "count_scored"): lambda *_: None,
            (metrics, "report"): lambda **known: WorkerReport(beat=time.time(), **known),
        }
        for (place, name), instead in nothing.items():
            setattr(place, name, instead)
        super()._prepare(settings.model_copy(update={"metrics_address": "none"}))


def main() -> None:
    """Print the ratios of medians, without metrics over with, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=Path, required=True, help="parquet: query, passage")
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    rows = pq.read_table(args.pairs, columns=["query", "passage"]).slice(0, args.sample)
    pairs = list(zip(rows["query"].to_pylist(), rows["passage"].to_pylist(), strict=True))
    uncounted = "benchmarks.engine.metrics.UncountedWorker"
    with cluster(1, args.threads) as one, cluster(1, args.threads, uncounted) as other:
        measured = {"on": Measured(one.url, args.model, pairs), "off": Measured(other.url, args.model, pairs)}
        with scraped(measured["on"].metrics_url):
            for number in range(args.rounds):
                for name in ("on", "off") if number % 2 else ("off", "on"):
                    measured[name].round(pairs)
        alone = by_itself(measured["on"].batches_per_cpu_second())
    print(json.dumps({**compared(measured["on"], measured["off"], args.sample), **alone}, indent=2))


class Measured:
    """A worker, and the seconds of each of its rounds."""

    def __init__(self, url: str, model: str, pairs: Pairs) -> None:
        client = redis.Redis.from_url(url)
        self._redis = client
        (self._name,) = queue_workers(client, "rankmill").scoring
        pid = client.hget(f"rq:worker:{self._name}", "pid")
        assert isinstance(pid, bytes)
        self._process = psutil.Process(int(pid))
        self.metrics_url = self._report().metrics_url
        self._client = Client(url, model=model)
        self._client.score(pairs)  # the model is loaded
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def round(self, pairs: Pairs) -> None:
        started, before = time.perf_counter(), sum(self._process.cpu_times()[:2])
        self._client.score(pairs)
        self.seconds.append(time.perf_counter() - started)
        self.cpu.append(sum(self._process.cpu_times()[:2]) - before)

    def batches_per_cpu_second(self) -> float:
        """Batches for each CPU second since the worker's start, model load included."""
        batches = self._report().batches
        return batches / sum(self._process.cpu_times()[:2])

    def _report(self) -> WorkerReport:
        return worker_reports(self._redis, [self._name])[self._name]


@contextmanager
def scraped(url: str | None) -> Iterator[None]:
    """Read the metrics once a second within the ``with`` block."""
    assert url
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(1):
            with urllib.request.urlopen(url) as reply:
                reply.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def compared(on: Measured, off: Measured, pairs: int) -> dict[str, Any]:
    """Ratios of medians, and how much the rounds of one worker differ."""
    median = statistics.median
    quartiles = statistics.quantiles(off.seconds)
    return {
        "pairs_per_second": round(pairs / median(on.seconds), 1),
        "throughput_on_over_off": round(median(off.seconds) / median(on.seconds), 4),
        "cpu_on_over_off": round(median(on.cpu) / median(off.cpu), 4),
        "quartiles_of_off_over_median": [round(value / median(off.seconds), 4) for value in quartiles],
    }


def by_itself(batches_per_second: float) -> dict[str, Any]:
    """CPU time of counting a batch, of a report and of a scrape; their share at the usual intervals.

    Counting a chunk is measured with each batch, because a chunk of a bulk run has at least one batch of its
    own.
    """
    from rankmill.workers.host import metrics

    run = new_run(ScoreSpec(model="demo"), queue="rankmill", ttl=60, max_retries=1)
    stats = ChunkStats(worker="w", device="cpu", device_name="cpu", backend="torch", precision="fp32",
                       revision=None, attempt=1, tokens=1900, padded_tokens=2000, batches=1,
                       seconds=0.1)  # fmt: skip
    scores = pa.array(np.linspace(0, 1, 20, dtype=np.float32))
    result = ChunkScores(chunk=0, scores=scores, errors=pa.nulls(20, pa.string()), stats=stats)

    def count() -> None:
        metrics.count_batch(20, 20, 1900, 2000, 2048)
        for stage in STAGES:
            with metrics.stage(stage):
                pass
        metrics.count_scored(run, "bulk", result, datetime.now(UTC), ())

    batch = cpu_seconds(count, 5000)
    report = cpu_seconds(lambda: WorkerReport(device="cpu", started=0.0, **metrics.figures()), 100)
    scrape = cpu_seconds(lambda: generate_latest(metrics.REGISTRY), 100)
    return {
        "counting_us_per_batch": round(1e6 * batch, 1),
        "report_ms": round(1000 * report, 2),
        "scrape_ms": round(1000 * scrape, 2),
        "share_of_cpu": round(batch * batches_per_second + report / 5 + scrape / 15, 5),
    }


def cpu_seconds(run: Callable[[], object], times: int) -> float:
    """CPU time of one run."""
    started = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - started) / times


if __name__ == "__main__":
    main()
