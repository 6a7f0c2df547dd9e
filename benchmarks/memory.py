"""Measures the peak memory of score-file and of its server, which should not grow with the input.

    python -m benchmarks.memory 100000 1000000 [-- OPTION...]

The command makes files of short rows, scores each with a tiny random model, and prints a line for each.
Options such as ``--top-k 10`` are those of score-file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.engine.models import random_bert

MIB = 1 << 20


def main() -> None:
    """Measure the sizes given on the command line (rows)."""
    arguments = [*sys.argv[1:], "--"]
    numbers, options = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 : -1]
    sizes = [int(number) for number in numbers] or [100_000, 1_000_000]
    print(f"{'rows':>10} {'seconds':>8} {'pairs/s':>8} {'producer MiB':>13} {'server MiB':>11}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = random_bert(directory / "model", hidden=8, layers=1, heads=1, positions=32)
        for rows in sizes:
            source = write_rows(directory / f"{rows}.parquet", rows)
            started = time.monotonic()
            producer, server = peaks(source, model, options)
            seconds = time.monotonic() - started
            print(
                f"{rows:>10,} {seconds:>8.1f} {rows / seconds:>8,.0f} {producer:>13.0f} {server:>11.0f}",
                flush=True,
            )


def write_rows(path: Path, rows: int, part: int = 100_000) -> Path:
    """Write a Parquet file of short pairs in parts."""
    schema = pa.schema([("query", pa.string()), ("passage", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, part):
            numbers = range(start, min(start + part, rows))
            columns = [[f"query {n // 100}" for n in numbers], [f"passage {n} of it" for n in numbers]]
            writer.write_table(pa.table(columns, schema=schema))
    return path


def peaks(source: Path, model: Path, options: Sequence[str] = ()) -> tuple[float, float]:
    """Peak resident memory in MiB of score-file, without pages of files, and of the embedded server."""
    command = [str(Path(sys.executable).parent / "score-file"), str(source), "--model", str(model), "--quiet"]
    command += options
    process = psutil.Popen(command)
    producer = server = 0.0
    while process.poll() is None:
        try:
            memory = process.memory_info()
            producer = max(producer, (memory.rss - memory.shared) / MIB)
            for child in process.children(recursive=True):
                if "valkey" in child.name():
                    server = max(server, child.memory_info().rss / MIB)
        except psutil.Error:  # a process has just ended
            continue
        time.sleep(0.1)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return producer, server


if __name__ == "__main__":
    main()
