"""Measures how long requests wait beside bulk work in a queue of simulated workers, and what bulk work keeps.

    python -m benchmarks.priorities --workers 1 --requests 40

The command sends requests of 20 pairs, one after the other, to idle workers and behind an endless bulk run.
Then it measures the speed of a bulk run by itself, and beside callers that send requests without a pause.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster import wait_until
from benchmarks.simulated import TOKENS, SimulatedCluster, collect, endless_pairs, finished, simulated_cluster
from rankmill import Client
from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS
from rankmill.producer.client.runs import ScoringRun

BATCH = TOKEN_BUDGETS["cpu"] // TOKENS
"""Pairs in a full batch of a simulated worker."""


@dataclass(frozen=True)
class Mixed:
    """Latencies of requests (s) on idle workers and behind bulk work; speeds of bulk work (chunks/s)."""

    idle: list[float]
    behind: list[float]
    alone: float
    beside: float
    requests: float

    def waited(self, batch_seconds: float) -> float:
        """How many batches longer than on idle workers the slowest of twenty requests takes."""
        return float(np.quantile(self.behind, 0.95) - np.quantile(self.idle, 0.95)) / batch_seconds


def measure(workers: int, requests: int, pairs: int, seconds: float, chunk_size: int, callers: int) -> Mixed:
    """Measure all figures on one cluster whose workers score 1,000 pairs a second."""
    with simulated_cluster(workers, 1.0) as cluster:
        client = Client(cluster.url, model="demo", chunk_size=chunk_size)
        latencies(client, 3, pairs)  # the model is loaded
        idle = latencies(client, requests, pairs)
        with bulk(cluster, client) as run:
            alone = speed(cluster, run, seconds)
            behind = latencies(client, requests, pairs)
            with endless_requests(client, callers, pairs) as done:
                time.sleep(2)
                before, since = len(done), time.monotonic()
                beside = speed(cluster, run, 2 * seconds)
                answered = (len(done) - before) / (time.monotonic() - since)
    return Mixed(idle, behind, alone, beside, answered)


def latencies(client: Client, requests: int, pairs: int) -> list[float]:
    """Seconds that each of some requests takes, one after the other."""
    found = []
    for number in range(requests):
        started = time.perf_counter()
        client.score([(f"request {number}", f"passage {passage}") for passage in range(pairs)], timeout=300)
        found.append(time.perf_counter() - started)
        time.sleep(0.05 * (number % 5))  # so that requests meet batches at any moment
    return found


@contextmanager
def bulk(cluster: SimulatedCluster, client: Client) -> Iterator[ScoringRun]:
    """Yield an endless bulk run that has begun."""
    run = client.submit(endless_pairs())
    collector = threading.Thread(target=collect, args=(run,), daemon=True)
    collector.start()
    wait_until(lambda: finished(cluster.client, run.id) > 2)
    try:
        yield run
    finally:
        run.cancel()
        collector.join()


@contextmanager
def endless_requests(client: Client, callers: int, pairs: int) -> Iterator[list[float]]:
    """Let callers send requests without a pause; yields the latencies so far."""
    done: list[float] = []
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            done.extend(latencies(client, 1, pairs))

    with ThreadPoolExecutor(callers) as pool:
        calls = [pool.submit(call) for _ in range(callers)]
        try:
            yield done
        finally:
            over.set()
    for each in calls:
        each.result()


def speed(cluster: SimulatedCluster, run: ScoringRun, seconds: float) -> float:
    """Chunks a second of a run."""
    before, since = finished(cluster.client, run.id), time.monotonic()
    time.sleep(seconds)
    return (finished(cluster.client, run.id) - before) / (time.monotonic() - since)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=20, help="in a request")
    parser.add_argument("--seconds", type=float, default=10, help="for the speed of bulk work")
    parser.add_argument("--chunk-size", type=int, default=1000, help="pairs in a chunk of bulk work")
    parser.add_argument("--callers", type=int, default=8, help="that send requests without a pause")
    found = measure(**vars(parser.parse_args()))
    for name, values in (("idle", found.idle), ("behind bulk work", found.behind)):
        p50, p95 = np.quantile(values, [0.5, 0.95])
        print(f"request, {name}: p50 {p50:.3f} s, p95 {p95:.3f} s")
    print(f"batches more at p95: {found.waited(BATCH / 1000):.2f} (a batch takes {BATCH / 1000:.3f} s)")
    print(f"bulk alone {found.alone:.2f} chunks/s, beside {found.requests:.1f} requests/s {found.beside:.2f}")
    print(f"share of its speed that bulk work keeps: {found.beside / found.alone:.2f}")


if __name__ == "__main__":
    main()
