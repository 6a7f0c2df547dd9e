"""What is lost when things die: one scenario a command, at random moments that a seed fixes.

    python -m benchmarks.chaos producer --rows 100000 --kills 20 --seed 1

Each makes a file, scores it once undisturbed and once under kills with the same model, compares
the two row by row and prints the figures. It fails if a row is lost, doubled, moved or different.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.registry import queue_workers
from tests.conftest import Server, score_file, serve, start_worker, wait_for
from tests.faults.kills import damage, finished_jobs, run_under_kills
from tests.models import make_bert

CHUNK = 128
WINDOW = 8

T = TypeVar("T")

Figures = dict[str, object]


def main() -> None:
    """Run one scenario and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        figures = SCENARIOS[options.scenario](Path(name), options.rows, options.kills, options.seed)
    for what, figure in figures.items():
        print(f"{what:<28} {figure:>12,.6g}" if isinstance(figure, float) else f"{what:<28} {figure:>12,}")
    if any(figures[f"rows {what}"] for what in ("lost", "doubled", "different", "moved")):
        sys.exit("rows were harmed")


def producer(directory: Path, rows: int, kills: int, seed: int) -> Figures:
    """SIGKILL score-file, with a server and a worker that live on, and run the same command again."""
    source = write_rows(directory / "a.parquet", rows)
    model = make_bert(directory / "model")
    output, undisturbed = directory / "killed.parquet", directory / "undisturbed.parquet"
    environ = {"RANKMILL_WINDOW": str(WINDOW)}
    command: list[object] = [
        source,
        "--model",
        model,
        "--precision",
        "fp32",
        "--chunk-size",
        CHUNK,
        "--quiet",
    ]
    with contextmanager(serve)() as server:
        command += ["--redis", server.url]
        worker = start_worker(server, "rankmill", directory)
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        calm, _ = timed(lambda: score_file(*command, "-o", undisturbed, environ=environ, timeout=3600))
        before = finished_jobs(server)
        seconds, end = timed(
            lambda: run_under_kills(
                [*command, "-o", output],
                output,
                kills=kills,
                writes=rows // CHUNK // kills // 4,  # a write keeps several chunks at a time
                seed=seed,
                environ=environ,
            )
        )
        if end.code or end.kills < kills:
            sys.exit(end.err or f"the run ended after {end.kills} kills; give it more --rows")
        wait_for(lambda: server.client.llen("rq:queue:rankmill") == 0)
        chunks = -(-rows // CHUNK)
        repeated = finished_jobs(server) - before - chunks
        worker.terminate()
        worker.wait()
        return {
            "rows": rows,
            "kills": end.kills,
            "restarts": end.kills,
            **{f"rows {what}": count for what, count in asdict(damage(output, undisturbed)).items()},
            "chunks": chunks,
            "chunks repeated": repeated,
            "at most (kills x window)": end.kills * WINDOW,
            "seconds": seconds,
            "seconds undisturbed": calm,
            "Redis peak, MiB": peak(server),
            "run keys left in Redis": len(list(server.client.scan_iter("rankmill:run:*"))),
        }


SCENARIOS: dict[str, Callable[[Path, int, int, int], Figures]] = {"producer": producer}


def timed(action: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `action` took, and what it returned."""
    started = time.monotonic()
    result = action()
    return time.monotonic() - started, result


def peak(server: Server) -> float:
    """The most memory the server has used, in MiB."""
    return float(server.client.info("memory")["used_memory_peak"]) / (1 << 20)


def write_rows(path: Path, rows: int) -> Path:
    """Pairs with an ``id``, of different lengths."""
    texts = [f"{'moon river ' * (n % 7)}{n}" for n in range(rows)]
    pq.write_table(pa.table({"id": range(rows), "query": ["big cat"] * rows, "passage": texts}), path)
    return path


if __name__ == "__main__":
    main()
