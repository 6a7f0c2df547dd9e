"""Starts fresh workers with given settings, measures them, and keeps the measurements on disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.protocol.worker_report import STAGES, queue_workers, worker_reports
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import Periodic, system
from rankmill.producer.collect.pairs import COLUMNS
from rankmill.producer.local.embedded import worker_environs
from rankmill.score.session import RunScores, Session

_LOOK_SECONDS = 0.1

_REPORT_SECONDS = 30
"""The longest wait for a worker's next report is ``heartbeat_seconds`` plus this many seconds."""


class Records:
    """Keeps measurements by key in a file, so that an interrupted command can continue without repeating
    them. An incomplete last line of the file is ignored.

    Parameters
    ----------
    path
        The file; it is created when the first value is added.
    prefix
        Text before each key in the file; it identifies what was measured. `get` does not find measurements
        with another prefix.

    Raises
    ------
    InputError
        The file exists, and a complete line of the file is not a measurement.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path = path
        self._prefix = prefix
        self._values: dict[str, Any] = {}
        self._good = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # the process died while it wrote this line
            try:
                record = json.loads(line)
                self._values[record["key"]] = record["value"]
            except (ValueError, TypeError, KeyError):
                raise InputError(f"{path}: not a file of rankmill's measurements; move it away") from None
            self._good += len(line)

    def get(self, key: str) -> Any | None:
        return self._values.get(self._prefix + key)

    def add(self, key: str, value: Any) -> None:
        """Add a measurement to the file. The `value` must have JSON's types; it is on disk when `add`
        returns.
        """
        key = self._prefix + key
        line = json.dumps({"key": key, "value": value}).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("r+b" if self._path.exists() else "xb") as file:
            file.truncate(self._good)
            file.seek(self._good)
            file.write(line)
            file.flush()
            system.fsync(file.fileno())
        self._good += len(line)
        self._values[key] = value


class BenchFailed(RankmillError):
    """Raised if the workers died or took too long during a measurement."""


class BenchTimeout(BenchFailed):
    """Raised if a measurement was stopped, because its time limit was reached."""


class Bench:
    """Runs a Redis server and workers of its own within the ``with`` block, and measures how they score.

    Parameters
    ----------
    settings
        Settings of the workers and of the runs.
    timeout
        Seconds from the creation of this object until all measurements fail.

    Attributes
    ----------
    workers
        Number of workers.
    deadline
        The time (monotonic) after which every measurement fails.

    Raises
    ------
    EmbeddedError
        The workers cannot be started.
    BenchFailed
        From every method that measures; `BenchTimeout` if the time is over.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self.settings = settings.model_copy(update={"redis_url": None})
        self.workers = len(worker_environs(settings))
        self._started = system.monotonic()
        self.deadline = self._started + timeout
        self._timeout = timeout
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        with contextlib.ExitStack() as stack:
            self._session = stack.enter_context(Session(self.settings))
            assert self._session.embedded is not None
            self._embedded = self._session.embedded
            self._memory = PeakMemory(self._embedded.pid)
            watch = Periodic("memory", self._memory.look, _LOOK_SECONDS)
            stack.callback(watch.stop)
            watch.start()
            self._redis = self._session.client.store.redis  # waits until the server is up
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def peak_bytes(self) -> int:
        """Highest total of the workers' resident memory so far, in bytes."""
        return self._memory.peak

    def warm_up(self, pairs: pa.Table, **spec: Any) -> float:
        """Score `pairs` until every worker has scored some; returns the seconds since the workers' start.

        Raises
        ------
        RunFailed
            The workers refuse the model, the precision or the backend.
        """
        seen: set[str] = set()
        rows = max(len(pairs) // (2 * self.workers), 1)
        while len(seen) < self.workers:
            seen |= self.bulk(pairs, chunk_size=rows, **spec).workers
        return system.monotonic() - self._started

    def bulk(self, pairs: pa.Table, *, chunk_size: int | None = None, **spec: Any) -> RunScores:
        return self._session.score(pairs, COLUMNS, chunk_size=chunk_size, on_wait=self._look, **spec)

    def requests(self, pairs: Iterable[pa.Table], concurrency: int) -> list[RunScores]:
        with system.Executor(concurrency) as threads:
            return list(threads.map(lambda table: self.bulk(table, chunk_size=len(table)), pairs))

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds that all workers together have spent in each stage of their work since their
        start. Waits for the workers' next reports.
        """
        began, seconds = system.now(), _REPORT_SECONDS + self.settings.heartbeat_seconds
        deadline = system.monotonic() + seconds
        names = queue_workers(self._redis, self.settings.queue).scoring
        while system.monotonic() < deadline:
            self._embedded.check()
            self._look()
            reports = worker_reports(self._redis, names).values()
            if len(reports) == len(names) and all(report.beat > began for report in reports):
                totals = np.sum([report.stage_seconds for report in reports], axis=0)
                return dict(zip(STAGES, totals.tolist(), strict=True))
            system.sleep(_LOOK_SECONDS)
        raise BenchFailed(f"the workers have not reported for {seconds:g} s")

    def _look(self) -> None:
        if self._embedded.worker_deaths:
            raise BenchFailed(self._embedded.last_death)
        if system.monotonic() > self.deadline:
            raise BenchTimeout(f"not done after {self._timeout:,.0f} s")


def split_requests(pairs: pa.Table, requests: int, size: int) -> list[pa.Table]:
    """Cut a table of pairs into one table for each request.

    Parameters
    ----------
    pairs
        The pairs to send. If there are too few, they are repeated.
    requests
        Number of requests.
    size
        Number of pairs in a request.
    """
    whole = pairs.take(np.arange(requests * size) % len(pairs))
    return [whole.slice(start, size) for start in range(0, len(whole), size)]


class PeakMemory:
    """Finds the peak memory of workers. Each call of `look` adds up the resident memory (bytes) of the
    workers that process `pid` has started.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._parent = psutil.Process(pid)

    def look(self) -> None:
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._parent.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "rankmill.ScoringWorker" in process.cmdline():
                        total += process.memory_info().rss
        self.peak = max(self.peak, total)
