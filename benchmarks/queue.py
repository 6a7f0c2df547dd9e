"""Cost of the queue: chunks a second that one Valkey can serve, and the number of workers it can feed.

    python -m benchmarks.queue --out DIR

Workers that do nothing take chunks as fast as RQ and Redis let them. The server's CPU time for a chunk,
measured, says how many chunks a second one server can carry when there are cores for enough workers; with
the speed of a worker in pairs a second that gives the number of workers one server feeds (a plot).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.cluster import cluster
from rankmill import Client
from rankmill.jobs.contract.results import ChunkScores, ChunkStats
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.wire import decode_pairs
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.queue.claim import Claim
from rankmill.workers.queue.refusals import Refusals
from rankmill.workers.queue.sources import source_of
from rankmill.workers.worker import ScoringWorker

SPEED = "BENCHMARK_PAIRS_PER_SECOND"
"""Variable with the pairs a second of an idle worker; without it, as many as it can."""

PASSAGE = "The moon is about 384,400 kilometres from the earth on average. " * 6
SPEEDS = np.geomspace(100, 200_000, 60)
"""Pairs a second of a worker, from a CPU to a large GPU."""


class NoScorer:
    """Fetches and decodes a chunk like any worker, and has its scores at once."""

    def __init__(self, store: RunStore, worker: str) -> None:
        self._store, self._worker = store, worker
        self.refusals = Refusals()

    def reads(self, _: Run) -> bool:
        return False

    def find_run(self, claim: Claim) -> ChunkScores | None:
        claim.source = source_of(claim.job, self._store)
        claim.run = claim.source.load()
        payload = self._store.payload(claim.run, claim.chunk) if claim.run else None
        if payload is None:
            return None
        rows = len(decode_pairs(payload)[0])
        time.sleep(rows / float(os.environ.get(SPEED, "inf")))
        counts = {"attempt": 1, "tokens": rows, "padded_tokens": rows, "batches": 1}
        how = {"device": "none", "backend": "none", "precision": "none", "revision": None}
        stats = ChunkStats.model_validate({"worker": self._worker, **how, **counts, "seconds": 0.0})
        return ChunkScores(
            claim.chunk, pa.array(np.zeros(rows, np.float32)), pa.nulls(rows, pa.string()), stats
        )


class IdleWorker(ScoringWorker):
    """A ScoringWorker without a model."""

    def _prepare(self, settings: WorkerSettings) -> None:
        super()._prepare(settings)
        self._claims.scorer = NoScorer(self.store, self.name)  # type: ignore[assignment]


def main() -> None:
    """Measure one and two idle workers for each chunk size, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for queue.json and queue.svg")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[64, 512, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=10, help="about, for each measurement")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    measured = [measure(size, args.workers, args.seconds) for size in args.chunk_sizes]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "queue.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    plot(measured, args.out / "queue.svg")


def measure(chunk_size: int, workers: int, seconds: float) -> dict[str, Any]:
    """Chunks a second through idle workers, and the server's CPU time for each."""
    with cluster(workers, 1, "benchmarks.queue.IdleWorker") as place:
        client = Client(place.url, model="demo", chunk_size=chunk_size, window=32 * workers)
        pairs = [(f"query {n // 100}", PASSAGE) for n in range(chunk_size)]
        drive(client, pairs, 20)
        speed = drive(client, pairs, 50)
        before = sum(place.server.cpu_times()[:2])
        chunks = max(int(speed * seconds), 50)
        speed = drive(client, pairs, chunks)
        server_ms = 1000 * (sum(place.server.cpu_times()[:2]) - before) / chunks
    result = {
        "chunk_size": chunk_size,
        "workers": workers,
        "chunks_per_second": round(speed, 1),
        "pairs_per_second": round(speed * chunk_size),
        "server_cpu_ms_per_chunk": round(server_ms, 3),
        "server_limit_chunks_per_second": round(1000 / server_ms),
    }
    print(json.dumps(result), flush=True)
    return result


def drive(client: Client, pairs: list[tuple[str, str]], chunks: int) -> float:
    """Chunks a second of one run."""
    started = time.perf_counter()
    for _ in client.submit(pair for _ in range(chunks) for pair in pairs).tables():
        pass
    return chunks / (time.perf_counter() - started)


def plot(measured: list[dict[str, Any]], path: Path) -> None:
    """Workers one server feeds, by their speed and the chunk size."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in measured:
        workers = row["server_limit_chunks_per_second"] * row["chunk_size"] / SPEEDS
        axes.loglog(SPEEDS, workers, label=f"{row['chunk_size']:,} pairs in a chunk")
    axes.set(xlabel="pairs a second of a worker", ylabel="workers one server feeds")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
