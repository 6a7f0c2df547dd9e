"""Worker processes of one host: one for each accelerator, started again when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import RankmillError

_EARLY_DEATH_SECONDS = 30
_FIRST_PAUSE_SECONDS = 0.25
_MAX_EARLY_DEATHS = 3
"""Workers that die so often, each within so few seconds of its start, will not get better."""

_AWAY_SECONDS = 1
"""A worker's death counts for nothing if Redis could not serve for so long at the time."""


class WorkersFailed(RankmillError):
    """Workers of this host refuse to start, or die at their start again and again."""


@dataclass
class Worker:
    """One place for a worker process, and how often it has had to be filled again."""

    name: str
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    died: float = 0.0
    deaths: int = 0
    early_deaths: int = 0

    @property
    def rq_name(self) -> str:
        """Name of the present process in RQ, which wants a new one for each."""
        return f"{self.name}-{self.deaths}"

    @property
    def refuses(self) -> bool:
        """Whether the present process has ended by saying that it cannot start with its settings."""
        return self.process is not None and self.process.poll() == os.EX_CONFIG

    @property
    def gave_up(self) -> bool:
        """Whether the present process has ended because Redis could not serve for too long."""
        return self.process is not None and self.process.poll() == os.EX_UNAVAILABLE


class WorkerPool:
    """Starts ScoringWorkers and keeps them alive.

    Parameters
    ----------
    queue
        The queue they listen on.
    url
        The server.
    environs
        One set of environment variables for each worker: its threads, its GPU.
    prefix
        What their names begin with.
    wait_seconds
        How long to wait for a server that cannot serve when a worker's jobs are to be handed on.
    logs
        Folder for their logs; default: they write where this process does.
    on_death
        Called with the worker and its exit status when one has died.
    """

    def __init__(
        self,
        queue: str,
        url: str,
        environs: Iterable[dict[str, str]],
        *,
        prefix: str,
        wait_seconds: float,
        logs: Path | None = None,
        on_death: Callable[[Worker, int], None] = lambda worker, code: None,
    ) -> None:
        self._queue, self._url, self._logs, self._on_death = queue, url, logs, on_death
        self._wait_seconds = wait_seconds
        self.workers = [Worker(f"{prefix}-{n}", environ) for n, environ in enumerate(environs, 1)]

    def look_after(self) -> Worker | None:
        """Start what is not there; the worker that is not to be started again, if any.

        It refuses to start, dies of it again and again, or has given up waiting for Redis.

        Raises
        ------
        RedisUnavailable
            The jobs of a worker that has died cannot be handed on.
        """
        for worker in self.workers:
            if worker.process is None:
                if time.monotonic() - worker.died > self._pause(worker):
                    self._start(worker)
            elif (code := worker.process.poll()) is not None:
                if worker.refuses or worker.gave_up:
                    return worker
                self._bury(worker, code)
                if worker.early_deaths >= _MAX_EARLY_DEATHS:
                    return worker
        return None

    def log(self, worker: Worker) -> Path | None:
        """Where the worker's log is."""
        return self._logs and self._logs / f"{worker.name}.log"

    def send(self, signum: signal.Signals) -> None:
        """Pass a signal on to all that live."""
        for process in self._alive():
            process.send_signal(signum)

    def wait(self) -> None:
        """Wait until all have ended."""
        for process in self._alive():
            process.wait()

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [worker.process for worker in self.workers if worker.process and worker.process.poll() is None]

    def _pause(self, worker: Worker) -> float:
        return _FIRST_PAUSE_SECONDS * 2**worker.early_deaths if worker.deaths else 0.0

    def _start(self, worker: Worker) -> None:
        log = self.log(worker)
        output = log.open("ab") if log else None
        worker.process = subprocess.Popen(
            worker_command(self._queue, worker.rq_name),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            cwd=self._logs,
            env={**os.environ, **worker.environ, "RQ_REDIS_URL": self._url},  # not for all to see in ps
            start_new_session=log is None,  # Ctrl-C is for the pool, which passes it on
        )
        if output:
            output.close()
        worker.started = time.monotonic()

    def _bury(self, worker: Worker, code: int) -> None:
        """Hand on the jobs of a worker that has died, and note how soon it did."""
        died = time.monotonic()
        # One that dies over a chunk will not get such chunks for ever: their retries are bounded. And
        # SIGKILL comes from outside, if not for the memory of a chunk.
        its_own = self._hand_on(worker) == 0 and code != -signal.SIGKILL
        its_own = its_own and time.monotonic() - died < _AWAY_SECONDS
        early = its_own and died - worker.started < _EARLY_DEATH_SECONDS
        worker.deaths += 1
        worker.early_deaths = worker.early_deaths + 1 if early else 0
        worker.process, worker.died = None, time.monotonic()
        self._on_death(worker, code)

    def _hand_on(self, worker: Worker) -> int:
        from jobs.recovery import hand_on_jobs  # most runs end without ever needing this
        from jobs.runs import RunStore
        from jobs.runtime.connection import client_for

        client = client_for(self._url, self._wait_seconds)
        try:
            return hand_on_jobs(RunStore(client), self._queue, worker.rq_name)
        finally:
            client.close()


def worker_command(queue: str, name: str) -> list[str]:
    """RQ's command line for a ScoringWorker, as the README shows it; the server is in the environment."""
    options = ["--worker-class", "workers.ScoringWorker", "--serializer", "json", "--name", name]
    return [sys.executable, "-m", "rq.cli", "worker", queue, *options]
