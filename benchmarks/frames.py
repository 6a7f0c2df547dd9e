"""Compares the peak memory of a producer that scores a frame with that for a file of the same rows.

    python -m benchmarks.frames --rows 1000000 --runs 3

Two processes call `Client.score` in turn, one with a polars frame, and one with a stream of the Parquet file
that the frame was made from; the workers compute nothing. For each process, the command prints the memory
before the call, which libraries and the frame take, the peak, and the difference, which is the producer's
part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster import cluster
from benchmarks.memory import write_rows

_KINDS = ("file", "polars")


def main() -> None:
    """Measure in turn, and print a line for each run and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "FILE", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    peaks: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(1, 1, "benchmarks.queue.IdleWorker") as place,
    ):
        path = write_rows(Path(folder) / "pairs.parquet", args.rows)
        for _ in range(args.runs):
            for kind in _KINDS:
                command = [sys.executable, "-m", "benchmarks.frames", "--one", kind, str(path), place.url]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found = json.loads(done.stdout)
                assert found["scored"] == args.rows, found
                peaks[kind].append(found["producer_mib"])
                print(json.dumps({"from": kind, **found}), flush=True)
    middle = {kind: statistics.median(each) for kind, each in peaks.items()}
    print(f"a frame's producer needs {middle['polars'] / middle['file']:.2f} times the memory of a file's")


def measure(kind: str, path: str, url: str) -> dict[str, Any]:
    """Score in this process, whose peak memory the system notes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rankmill import Client

    pairs: Any
    if kind == "polars":
        import polars as pl

        pairs = pl.read_parquet(path)
    else:
        file = pq.ParquetFile(path)
        pairs = pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches(1024))
    client = Client(url, model="demo")
    client.score([("query", "passage")])  # the first run imports and starts more
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak
    before = resident("VmRSS")
    scores = client.score(pairs)
    peak = resident("VmHWM")
    return {
        "scored": int(np.isfinite(scores).sum()),
        "before_mib": round(before),
        "peak_mib": round(peak),
        "producer_mib": round(peak - before, 1),
    }


def resident(name: str) -> float:
    """A figure of this process's memory, in MiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))


if __name__ == "__main__":
    main()
