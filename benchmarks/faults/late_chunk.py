"""Measures the memory of producer and server, which should not grow while one chunk of a run is held back.

    python -m benchmarks.faults.late_chunk --seconds 60

Two workers compute nothing. One of them takes its time for the first chunk; the other scores all chunks
after it. Each line shows the rows that are done, and the resident memory of the producer and of the server.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import psutil

from benchmarks.cluster import cluster
from benchmarks.queue import PASSAGE, IdleWorker
from rankmill import Client
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.producer.client.runs import ScoringRun
from rankmill.workers.queue.chunks import ChunkClaim, ChunkScorer

LATE_SECONDS = "LATE_SECONDS"
"""Environment variable with the seconds that the first chunk takes."""

_MIB = 1 << 20
_LINE_SECONDS = 5


class LateWorker(IdleWorker):
    """A ScoringWorker without a model that holds the first chunk back."""

    def _prepare(self, settings: WorkerSettings) -> None:
        begin = ChunkScorer.begin

        def begin_late(scorer: ChunkScorer, claim: ChunkClaim, *args: Any, **options: Any) -> None:
            if claim.chunk == 0:
                time.sleep(float(os.environ[LATE_SECONDS]))
            begin(scorer, claim, *args, **options)

        ChunkScorer.begin = begin_late  # type: ignore[assignment, method-assign]
        super()._prepare(settings)


def main() -> None:
    """Score an endless run until the first chunk, and all that waited for it, are there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60, help="how long the first chunk is late")
    parser.add_argument("--chunk-size", type=int, default=1024)
    args = parser.parse_args()
    os.environ[LATE_SECONDS] = str(args.seconds)
    with cluster(2, 1, "benchmarks.faults.late_chunk.LateWorker") as place:
        run = Client(place.url, model="demo", chunk_size=args.chunk_size).submit(pairs())
        ended = threading.Event()
        watch = threading.Thread(target=print_memory, args=(run, place.server, ended), daemon=True)
        watch.start()
        taken = late = 0
        for part in run.tables():
            late = late or run.progress.rows  # when the first chunk has come
            taken += len(part.table)
            if taken >= late:
                break
        ended.set()
        watch.join()
        run.cancel()


def pairs() -> Iterator[tuple[str, str]]:
    """Distinct pairs of about 400 bytes without end."""
    for number in count():
        yield f"query {number // 100}", f"{number} {PASSAGE}"


def print_memory(run: ScoringRun, server: psutil.Process, ended: threading.Event) -> None:
    """Print a line every few seconds, and one at the end."""
    began, producer = time.monotonic(), psutil.Process()
    print(f"{'seconds':>8} {'rows':>12} {'producer MiB':>13} {'server MiB':>11}", flush=True)
    last = False
    while not last:
        last = ended.wait(_LINE_SECONDS)
        memory = [process.memory_info().rss / _MIB for process in (producer, server)]
        seconds = time.monotonic() - began
        print(f"{seconds:>8.0f} {run.progress.rows:>12,} {memory[0]:>13.0f} {memory[1]:>11.0f}", flush=True)


if __name__ == "__main__":
    main()
