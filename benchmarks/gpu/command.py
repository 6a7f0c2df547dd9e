"""Watches the user's command on a device, which is score-file from Parquet to Parquet."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import redis

from benchmarks.comparison.rerankers import make_pairs
from rankmill.jobs.contract.run import Progress

_LOOK_SECONDS = 0.1
"""Time between two looks at the rows that are done and at the device."""

_STEADY = (0.3, 0.9)
"""The steady part of a run lies between these shares of its rows."""

_SCORE_FILE = "from rankmill.cli.score import score_file; score_file()"

_DISTINCT = 20_000
"""Pairs of a file that are made one by one; the others repeat them with a number before each passage."""


@dataclass(frozen=True)
class Command:
    """The figures of one run of score-file.

    Attributes
    ----------
    processes
        Worker processes that share the device.
    known
        Whether host, model and device were known from a run before.
    rows
        Pairs of the file.
    seconds
        From the start of the command to its end, with all imports.
    startup, load
        Seconds until a worker was there, and from then until one had the model.
    first
        Seconds until the first scores were collected; ``None`` if nobody saw them.
    early
        Rows that were collected ten seconds after the start.
    steady
        Pairs a second in the steady part (`_STEADY`).
    busy
        Share of the steady part in which the device computed, by NVML; ``None`` without it.
    worker_us, producer_us
        CPU time for a pair of all workers, and of score-file's own process, in µs, start included.
    """

    processes: int
    known: bool
    rows: int
    seconds: float
    startup: float
    load: float
    first: float | None
    early: int
    steady: float
    busy: float | None
    worker_us: float
    producer_us: float


def write_pairs(path: Path, rows: int) -> Path:
    """A Parquet file of `rows` pairs with MS MARCO's lengths, no two of them alike."""
    part = pq.read_table(make_pairs(path.with_suffix(".part"), min(rows, _DISTINCT), "MiniLM-L6"))
    with pq.ParquetWriter(path, part.schema.append(pa.field("id", pa.int64()))) as writer:
        for start in range(0, rows, len(part)):
            ids = pa.array(range(start, min(start + len(part), rows)))
            block = part.slice(0, len(ids))
            passages = pc.binary_join_element_wise(ids.cast(pa.string()), block["passage"], " ")
            writer.write_table(pa.table([block["query"], passages, ids], names=["query", "passage", "id"]))
    return path


def run_command(
    model: Path,
    source: Path,
    rows: int,
    folder: Path,
    *,
    device: str,
    processes: int,
    known: bool,
    options: Sequence[str] = (),
) -> Command:
    """Run score-file once, with a cache of its own in `folder`; raises `SystemExit` if it fails.

    Without `known` the cache is empty.
    """
    output, cache = folder / "scored.parquet", folder / "cache"
    if not known and cache.exists():
        shutil.rmtree(cache)
    command = [
        sys.executable, "-c", _SCORE_FILE, str(source), "--model", str(model), "-o", str(output), "--json",
        "--force", "--device", device, "--workers", str(processes), *options,
    ]  # fmt: skip
    temporary = Path(tempfile.mkdtemp(prefix="rm-"))  # short, because socket paths are limited
    environ = {**os.environ, "RANKMILL_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    started = time.monotonic()
    with (
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process,
        _Watch(process.pid, temporary, device, started) as watch,
    ):
        out = process.communicate()[0]
        seconds = time.monotonic() - started
    shutil.rmtree(temporary, ignore_errors=True)
    if process.returncode:
        raise SystemExit(f"score-file ended with {process.returncode}")
    summary = json.loads(out)
    return Command(
        processes=processes,
        known=known,
        rows=rows,
        seconds=seconds,
        startup=summary["startup_seconds"],
        load=summary["load_seconds"],
        first=watch.first,
        early=watch.rows_at(10.0),
        steady=watch.steady(rows),
        busy=watch.busy(rows),
        worker_us=1e6 * watch.worker_seconds / rows,
        producer_us=1e6 * watch.producer_seconds / rows,
    )


class _Watch:
    """Looks at the rows, the CPU time and the use of the device of a command while it runs.

    `temporary` is the folder in which its own server has its socket.
    """

    def __init__(self, pid: int, temporary: Path, device: str, started: float) -> None:
        self._process = psutil.Process(pid)
        self._temporary = temporary
        self._server: Any = None
        self._run_key: bytes | None = None
        self._device, self._started = device, started
        self._seen: list[tuple[float, int, float | None]] = []
        self._cpu: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.producer_seconds = 0.0

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def worker_seconds(self) -> float:
        return sum(self._cpu.values())

    @property
    def first(self) -> float | None:
        """When the first rows were in the journal, in seconds after the start."""
        return next((at for at, rows, _ in self._seen if rows), None)

    def rows_at(self, seconds: float) -> int:
        return max((rows for at, rows, _ in self._seen if at <= seconds), default=0)

    def steady(self, rows: int) -> float:
        """Pairs a second in the steady part; 0 if it was too short to be seen."""
        part = self._part(rows)
        if len(part) < 2 or part[-1][0] == part[0][0]:
            return 0.0
        return (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0])

    def busy(self, rows: int) -> float | None:
        """The device's share of busy time in the steady part."""
        shares = [share for _, _, share in self._part(rows) if share is not None]
        return statistics.mean(shares) if shares else None

    def _part(self, rows: int) -> list[tuple[float, int, float | None]]:
        low, high = (share * rows for share in _STEADY)
        return [each for each in self._seen if low <= each[1] <= high]

    def _run(self) -> None:
        with _nvml(self._device) as use:
            while not self._over.wait(_LOOK_SECONDS):
                self._seen.append((time.monotonic() - self._started, self._rows(), use()))
                self._look_at_processes()

    def _rows(self) -> int:
        before = self._seen[-1][1] if self._seen else 0
        with suppress(redis.RedisError):
            if self._server is None:
                for socket in self._temporary.glob("rankmill-*/server.sock"):
                    self._server = redis.Redis(unix_socket_path=str(socket))
            if self._server is not None and self._run_key is None:
                self._run_key = next(self._server.scan_iter("rankmill:run:*:progress", count=1000), None)
            if self._server is not None and self._run_key and (written := self._server.get(self._run_key)):
                return max(Progress.read_json(written, "the progress").rows, before)
        return before

    def _look_at_processes(self) -> None:
        with suppress(psutil.Error):
            self.producer_seconds = sum(self._process.cpu_times()[:2])
            for child in self._process.children(recursive=True):
                if "rq.cli" in child.cmdline():
                    self._cpu[child.pid] = sum(child.cpu_times()[:2])


@contextmanager
def _nvml(device: str) -> Iterator[Callable[[], float | None]]:
    """Yield a function that says for which share of the last moment the first GPU was busy; ``None`` if
    unknown.
    """
    if device != "cuda":
        yield lambda: None
        return
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    yield lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    pynvml.nvmlShutdown()
