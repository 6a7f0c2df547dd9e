"""Measures the scored work that is not in the journal, which a kill of producer and workers would lose.

    python -m benchmarks.faults.losses --pairs-per-second 100 --seconds 60

One worker, which sleeps instead of computing, scores pairs with lengths as real ones have (from 8 words to
250). Ten times a second the tokens of the rows in score-file's journal are compared with those that the
worker has scored by then; the difference, in seconds of its work, is what a kill at that moment would lose.
At the end both are killed, and the journal must have what it had at the last look, or more.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cluster import wait_until
from benchmarks.faults.kills import folder_of, start
from benchmarks.simulated import LENGTHS, SCORED, simulated_cluster

LOOK_SECONDS = 0.1


def main() -> None:
    """Run, look, kill, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs-per-second", type=float, default=100, help="speed of the worker")
    parser.add_argument("--seconds", type=float, default=60, help="how long to look")
    parser.add_argument("--chunk-size", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        lost = measure(Path(name), args.pairs_per_second, args.seconds, args.chunk_size)
    print(f"seconds of scored work that a kill loses, at {len(lost)} moments:")
    print(f"mean {np.mean(lost):.2f}, 95th percentile {np.quantile(lost, 0.95):.2f}, most {max(lost):.2f}")
    print("in turn:", *(f"{one:.1f}" for one in lost[::5]))


def measure(directory: Path, speed: float, seconds: float, chunk_size: str) -> list[float]:
    """The loss at each moment, in seconds of the worker's work."""
    source, output, log = directory / "in.parquet", directory / "out.parquet", directory / "scored"
    tokens = np.cumsum([0, *write_pairs(source, round(speed * (seconds + 120)))])
    log.touch()
    environ = {LENGTHS: str(tokens[-1] / (len(tokens) - 1)), SCORED: str(log)}
    with simulated_cluster(1, 1000 / speed, environ) as cluster:
        command = [source, "-o", output, "--redis", cluster.url, "--quiet", "--chunk-size", chunk_size]
        producer = start(*command)
        try:
            wait_until(lambda: log.stat().st_size)
            began, looks = time.monotonic(), []
            while (now := time.monotonic()) - began < seconds:
                if (chunks := journalled(output)) is not None:
                    looks.append((now, sum(int(tokens[at + rows] - tokens[at]) for at, rows in chunks)))
                time.sleep(LOOK_SECONDS)
        finally:
            producer.kill()
            producer.communicate()
        cluster.stop()
        left = sum(int(tokens[at + rows] - tokens[at]) for at, rows in journalled(output) or [])
        if left < looks[-1][1]:
            raise SystemExit(f"{looks[-1][1]} tokens were in the journal, and {left} after the kill")
    return losses(log, looks)


def losses(log: Path, looks: list[tuple[float, int]]) -> list[float]:
    """The seconds of work, at each look, that were scored and not in the journal."""
    ends, tokens = np.loadtxt(log).T
    scored = np.cumsum(tokens)
    rate = (scored[-1] - scored[0]) / (ends[-1] - ends[0])
    at = np.searchsorted(ends, [now for now, _ in looks], side="right") - 1
    return [max(float(scored[last] - there), 0.0) / rate for last, (_, there) in zip(at, looks, strict=True)]


def journalled(output: Path) -> list[tuple[int, int]] | None:
    """The first row and the number of rows of each chunk that is committed to the journal, read from a copy;
    ``None`` if the copy was made in the middle of a change.
    """
    path = folder_of(output) / "journal.db"
    with tempfile.TemporaryDirectory() as name, suppress(sqlite3.Error):
        for ending in ("", "-wal"):
            with suppress(FileNotFoundError):
                Path(name, f"copy.db{ending}").write_bytes(Path(f"{path}{ending}").read_bytes())
        with closing(sqlite3.connect(Path(name, "copy.db"))) as journal:
            return list(journal.execute("SELECT chunk, rows FROM chunks"))
    return None


def write_pairs(path: Path, rows: int) -> list[int]:
    """Write distinct pairs with about the lengths of MS MARCO's; returns the words of each, about 88."""
    rng = random.Random(1)
    lengths = np.clip(np.random.default_rng(1).lognormal(4.3, 0.5, rows), 4, 246).astype(int)
    words = [f"w{number}" for number in range(2000)]
    passages = [" ".join(rng.choices(words, k=int(length))) for length in lengths]
    pq.write_table(pa.table({"query": ["four words of query"] * rows, "passage": passages}), path)
    return [4 + int(length) for length in lengths]


if __name__ == "__main__":
    main()
