"""Fresh workers with one setting, and what can be measured of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from jobs.errors import RankmillError
from jobs.runtime.settings import Settings
from jobs.worker_report import STAGES, queue_workers, worker_reports
from rankmill.local.embedded import worker_environs
from rankmill.session import Scored, Session
from rankmill.tuning.pairs import COLUMNS

_LOOK_SECONDS = 0.1
_REPORT_SECONDS = 30


class BenchFailed(RankmillError):
    """Workers died, or took too long: what was to be measured cannot be on this machine."""


class Bench:
    """A private server and its workers, which end with the ``with`` block.

    Parameters
    ----------
    settings
        Of the workers and of the run.
    timeout
        Seconds until whatever is under way is given up.

    Attributes
    ----------
    workers
        How many there are.

    Raises
    ------
    EmbeddedError
        The workers cannot be started.
    BenchFailed
        From all that measures.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self.settings = settings.model_copy(update={"redis_url": None})
        self.workers = len(worker_environs(settings))
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._timeout = timeout
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        with contextlib.ExitStack() as stack:
            self._session = stack.enter_context(Session(self.settings))
            assert self._session.embedded is not None
            self._embedded = self._session.embedded
            self._memory = stack.enter_context(_PeakMemory(self._embedded.pid))
            self._redis = self._session.client.store.redis  # once the server is up
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def peak_bytes(self) -> int:
        """Resident memory of all workers together, at its highest until now."""
        return self._memory.peak

    def warm_up(self, pairs: pa.Table, **spec: Any) -> float:
        """Score `pairs` until every worker has had some; seconds since the start of the workers.

        Raises
        ------
        RunFailed
            The workers refuse the model, the precision, the backend.
        """
        seen: set[str] = set()
        rows = max(len(pairs) // (2 * self.workers), 1)
        while len(seen) < self.workers:
            seen |= self._score(pairs, chunk_size=rows, **spec).workers
        return time.monotonic() - self._started

    def bulk(self, pairs: pa.Table, **spec: Any) -> Scored:
        """Score `pairs` as one run, in chunks of the settings' size."""
        return self._score(pairs, **spec)

    def requests(self, pairs: Iterable[pa.Table], concurrency: int) -> list[Scored]:
        """Score each table as a run of its own, so many of them at a time."""
        with ThreadPoolExecutor(concurrency) as threads:
            try:
                return list(threads.map(lambda table: self._score(table, chunk_size=len(table)), pairs))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def stage_seconds(self) -> dict[str, float]:
        """What the workers' time since their start went into, by what they next say of themselves."""
        asked = time.time()
        deadline = time.monotonic() + _REPORT_SECONDS
        names = queue_workers(self._redis, self.settings.queue).scoring
        while time.monotonic() < deadline:
            self._embedded.check()
            self._look()
            found = worker_reports(self._redis, names).values()
            if len(found) == len(names) and all(report.beat > asked for report in found):
                totals = np.sum([report.stage_seconds for report in found], axis=0)
                return dict(zip(STAGES, totals.tolist(), strict=True))
            time.sleep(_LOOK_SECONDS)
        raise BenchFailed(f"the workers have not reported for {_REPORT_SECONDS} s")

    def _score(self, pairs: pa.Table, *, chunk_size: int | None = None, **spec: Any) -> Scored:
        return self._session.score(pairs, COLUMNS, chunk_size=chunk_size, on_wait=self._look, **spec)

    def _look(self) -> None:
        if self._embedded.worker_deaths:
            raise BenchFailed(self._embedded.last_death)
        if time.monotonic() > self._deadline:
            raise BenchFailed(f"not done after {self._timeout:,.0f} s")


def cut(pairs: pa.Table, requests: int, size: int) -> list[pa.Table]:
    """Tables of `size` rows, `requests` of them, starting over where `pairs` end."""
    whole = pairs.take(np.arange(requests * size) % len(pairs))
    return [whole.slice(start, size) for start in range(0, len(whole), size)]


class _PeakMemory:
    """Watches the resident memory of the workers under a process."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._parent = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._parent.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "workers.ScoringWorker" in process.cmdline():
                        total += process.memory_info().rss
        return total
