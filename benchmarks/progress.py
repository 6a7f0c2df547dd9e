"""Measures how soon and how often simulated workers' runs show progress, and how exact their time left is.

    python -m benchmarks.progress --workers 1 8 --seconds 40

For each number of workers, the command prints the seconds from the first score of any worker to the first
rows that are shown, the longest time without a change after that, and the error of the time left when a tenth
of the rows is done and when half of them are.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.simulated import FIRST, simulated_cluster
from rankmill import Client
from rankmill.jobs.contract.run import Progress

PAIRS_PER_SECOND = 1000
"""Speed of a simulated worker, whose batches have 128 pairs."""


def main() -> None:
    """Measure and print a line for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=40, help="length of each run")
    parser.add_argument("--chunk-size", default="auto")
    args = parser.parse_args()
    for workers in args.workers:
        rows = int(workers * PAIRS_PER_SECOND * args.seconds)
        print(f"{workers} workers:", measure(workers, rows, args.chunk_size), flush=True)


def measure(workers: int, rows: int, chunk_size: int | Literal["auto"]) -> str:
    """Score `rows` pairs and describe the progress that was shown."""
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_cluster(workers, 1000 / PAIRS_PER_SECOND, {FIRST: f"{folder}/first"}) as cluster,
    ):
        client = Client(cluster.url, model="demo", chunk_size=chunk_size)
        pairs = [(f"query {number // 100}", f"passage {number}") for number in range(rows)]
        seen: list[tuple[float, Progress]] = []
        run = client.submit(pairs)

        def look() -> None:
            if not seen or seen[-1][1].rows != run.progress.rows:
                seen.append((time.monotonic(), run.progress))

        run._drivers[0].on_wait = look
        for _ in run.tables():
            look()
        end = time.monotonic()
        first = float(Path(folder, "first").read_text())
    shown = [(at, progress) for at, progress in seen if progress.rows]
    gap = max(later[0] - earlier[0] for earlier, later in pairwise(shown))

    def error(enough: Callable[[Progress], bool]) -> str:
        at, progress = next((at, progress) for at, progress in shown if enough(progress))
        left = progress.seconds_left(rows, progress.at)
        return "not known" if left is None else f"{left / (end - at) - 1:+.0%}"

    tenth, half = error(lambda it: it.rows >= rows / 10), error(lambda it: it.rows >= rows / 2)
    return (
        f"first progress after {shown[0][0] - first:.2f} s, at most {gap:.2f} s without a change; "
        f"error of the time left at a tenth {tenth}, at half {half}"
    )


if __name__ == "__main__":
    main()
