"""What a SIGKILL of producer and workers at any moment loses: scored work that is not in the journal.

    python -m benchmarks.faults.losses --pairs-per-second 100 --seconds 60

One worker, which sleeps instead of computing, scores pairs with lengths as real ones have (from 8 words to
250). Ten times a second the rows in score-file's journal are compared with those that the worker has scored
by then; the difference, in seconds of its work, is what a kill at that moment would lose. At the end both are
killed, and the journal must have what it had at the last look, or more.
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
from benchmarks.simulated import FIRST, LENGTHS, simulated_cluster

LOOK_SECONDS = 0.1


def main() -> None:
    """Run, look, kill, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs-per-second", type=float, default=100, help="speed of the worker")
    parser.add_argument("--seconds", type=float, default=60, help="how long to look")
    parser.add_argument("--chunk-size", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        losses = measure(Path(name), args.pairs_per_second, args.seconds, args.chunk_size)
    print(f"seconds of scored work that a kill loses, at {len(losses)} moments:")
    print(
        f"mean {np.mean(losses):.2f}, 95th percentile {np.quantile(losses, 0.95):.2f}, most {max(losses):.2f}"
    )


def measure(directory: Path, speed: float, seconds: float, chunk_size: str) -> list[float]:
    """The loss at each moment, in seconds of the worker's work."""
    source, output = directory / "in.parquet", directory / "out.parquet"
    write_pairs(source, round(speed * (seconds + 120)))
    first = directory / "first"
    with simulated_cluster(1, 1000 / speed, {LENGTHS: "1", FIRST: str(first)}) as cluster:
        command = [source, "-o", output, "--redis", cluster.url, "--quiet", "--chunk-size", chunk_size]
        producer = start(*command)
        try:
            wait_until(lambda: first.exists() and first.read_text())
            began = float(first.read_text())
            losses, last = [], 0
            while (now := time.monotonic()) - began < seconds:
                if (rows := journalled(output)) is not None:
                    losses.append(max(now - began - rows / speed, 0))
                    last = rows
                time.sleep(LOOK_SECONDS)
        finally:
            producer.kill()
            producer.communicate()
        cluster.stop()
        kept = journalled(output) or 0
        if kept < last:
            raise SystemExit(f"{last} rows were in the journal, and {kept} after the kill")
    return losses


def journalled(output: Path) -> int | None:
    """Rows that are committed to the journal, of which no other process reads anything but a copy.

    ``None`` if the copy was made in the middle of a change.
    """
    path = folder_of(output) / "journal.db"
    with tempfile.TemporaryDirectory() as name, suppress(sqlite3.Error):
        for ending in ("", "-wal"):
            with suppress(FileNotFoundError):
                Path(name, f"copy.db{ending}").write_bytes(Path(f"{path}{ending}").read_bytes())
        with closing(sqlite3.connect(Path(name, "copy.db"))) as journal:
            return int(journal.execute("SELECT coalesce(sum(rows), 0) FROM chunks").fetchone()[0])
    return None


def write_pairs(path: Path, rows: int) -> None:
    """Distinct pairs whose lengths are about those of MS MARCO's: 92 words on average."""
    rng = random.Random(1)
    lengths = np.clip(np.random.default_rng(1).lognormal(4.3, 0.5, rows), 4, 246).astype(int)
    words = [f"w{number}" for number in range(2000)]
    passages = [" ".join(rng.choices(words, k=int(length))) for length in lengths]
    pq.write_table(pa.table({"query": ["four words of query"] * rows, "passage": passages}), path)


if __name__ == "__main__":
    main()
