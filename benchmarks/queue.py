"""Measures how many chunks a second one Valkey server can serve, and how many workers it can feed.

    python -m benchmarks.queue --out DIR

Workers that do nothing take chunks as fast as RQ and Redis let them. The measured CPU time of the server for
a chunk says how many chunks a second one server can serve if there are cores for enough workers. With the
speed of a worker in pairs a second, this gives the number of workers that one server feeds, which is plotted.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import cluster
from benchmarks.simulated import SECONDS, SimulatedWorker
from rankmill import Client
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.loading import Loaded

SPEED = "BENCHMARK_PAIRS_PER_SECOND"
"""Environment variable with the pairs a second of an idle worker; without it, there is no limit."""

PASSAGE = "The moon is about 384,400 kilometres from the earth on average. " * 6
SPEEDS = np.geomspace(100, 200_000, 60)
"""Pairs a second of a worker, from a CPU to a large GPU."""


class IdleWorker(SimulatedWorker):
    """A ScoringWorker whose forward takes no time, or as long as `SPEED` says."""

    def load(self, spec: ScoreSpec) -> Loaded:
        os.environ[SECONDS] = str(1000 / float(os.environ.get(SPEED, "inf")))
        return super().load(spec)


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
    """Plot how many workers one server feeds, by their speed and the chunk size."""
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
