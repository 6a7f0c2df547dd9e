"""Worker processes of one host, which are started again when they die."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.runtime.hosts import SUPERVISED, worker_name
from rankmill.jobs.system import Backoff, system

_EARLY_DEATH_SECONDS = 30
_BACKOFF = Backoff(first=0.25, longest=2.0)
_MAX_EARLY_DEATHS = 3
"""A worker that dies this many times in a row within `_EARLY_DEATH_SECONDS` of its start, by its own fault,
is not started again.
"""

_AWAY_SECONDS = 1
"""If returning a dead worker's jobs to the queue takes this many seconds, Redis did not serve. Then the death
is not taken for the worker's own fault.
"""


class WorkersFailed(RankmillError):
    """Raised if a worker of this host refuses to start, dies repeatedly at its start, or gave up waiting for
    Redis.
    """


@dataclass
class LocalWorker:
    """A worker of this host, with its current process, and how often its processes have died."""

    name: str
    environ: dict[str, str]
    is_added: bool = False
    """Whether the worker was added to other workers on the same accelerator. If an added worker dies
    repeatedly or refuses to start, it is not started again, and the other workers continue.
    """
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    died: float = 0.0
    deaths: int = 0
    early_deaths: int = 0

    @property
    def rq_name(self) -> str:
        """Name of the worker's current process in RQ, which needs a new name for each process."""
        return f"{self.name}.{self.deaths + 1}" if self.deaths else self.name

    @property
    def gpu(self) -> str | None:
        """The worker's ``CUDA_VISIBLE_DEVICES``, which names its NVIDIA GPU; ``None`` if it is not set."""
        return self.environ.get("CUDA_VISIBLE_DEVICES")

    @property
    def refuses(self) -> bool:
        """Whether the current process has ended because it cannot start with its settings."""
        return self.process is not None and self.process.poll() == os.EX_CONFIG

    @property
    def gave_up(self) -> bool:
        """Whether the current process has ended because Redis could not serve for too long."""
        return self.process is not None and self.process.poll() == os.EX_UNAVAILABLE


class WorkerProcesses:
    """Starts ScoringWorkers, and starts them again when they die.

    Parameters
    ----------
    queues
        The queues that the workers listen on, in order of preference.
    url
        URL of the server.
    environs
        Environment variables of each worker, with its threads and its GPU.
    names
        Name of each worker.
    wait_seconds
        Seconds to wait for the server if it does not serve when a dead worker's jobs are returned.
    logs
        Folder for the workers' logs, ``NAME.log``; by default workers write to this process's output.
    on_death
        Called with the worker and its exit status after a death.
    on_given_up
        Called with a worker from `add_beside` that will not be started again.
    """

    def __init__(
        self,
        queues: Sequence[str],
        url: str,
        environs: Iterable[dict[str, str]],
        *,
        names: Iterable[str],
        wait_seconds: float,
        logs: Path | None = None,
        on_death: Callable[[LocalWorker, int], None] = lambda worker, code: None,
        on_given_up: Callable[[LocalWorker], None] = lambda worker: None,
    ) -> None:
        self._queues, self._url, self._logs = queues, url, logs
        self._on_death, self._on_given_up = on_death, on_given_up
        self._wait_seconds = wait_seconds
        self._is_stopping = False
        self.workers = [LocalWorker(name, environ) for name, environ in zip(names, environs, strict=True)]

    def restart_dead(self) -> LocalWorker | None:
        """Start every worker that is not running. A worker that has died is started after a pause.

        Returns the first worker that has failed, or ``None``. A worker has failed in three cases:

        - It has given up waiting for Redis.
        - It refuses to start.
        - It dies repeatedly at its start.

        A worker from `add_beside` counts as failed only in the first case. In the other two cases it is
        removed, and the other workers continue.

        Raises
        ------
        RedisUnavailable
            The jobs of a dead worker cannot be returned to the queue.
        """
        for worker in self.workers[:]:
            if worker.process is None:
                if not self._is_stopping and system.monotonic() - worker.died > self._pause(worker):
                    self._start(worker)
            elif (code := worker.process.poll()) is not None:
                if worker.gave_up:
                    return worker
                if not worker.refuses:
                    self._record_death(worker, code)
                    if worker.early_deaths < _MAX_EARLY_DEATHS:
                        continue
                if not worker.is_added:
                    return worker
                self.workers.remove(worker)
                self._on_given_up(worker)
        return None

    def add_beside(self, workers: Sequence[LocalWorker]) -> None:
        """Add a worker that shares the accelerator of `workers`; `restart_dead` starts it."""
        first = workers[0]
        self.workers.append(LocalWorker(f"{first.name}-{len(workers) + 1}", first.environ, is_added=True))

    def stop(self) -> None:
        """Send SIGTERM to all processes, and start no further ones. Signal handlers may call this."""
        self._is_stopping = True
        self.send(signal.SIGTERM)

    def send(self, signum: signal.Signals) -> None:
        for process in self._alive():
            process.send_signal(signum)

    def wait(self) -> None:
        for process in self._alive():
            process.wait()

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [worker.process for worker in self.workers if worker.process and worker.process.poll() is None]

    def _pause(self, worker: LocalWorker) -> float:
        return _BACKOFF.pause(worker.early_deaths + 1) if worker.deaths else 0.0

    def _start(self, worker: LocalWorker) -> None:
        output = (self._logs / f"{worker.name}.log").open("ab") if self._logs else None
        worker.process = system.Popen(
            worker_command(self._queues, worker.rq_name),
            stdin=subprocess.PIPE,  # closes when this process ends, and then the worker ends (SUPERVISED)
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            env={**os.environ, **worker.environ, **server_environ(self._url), SUPERVISED: "1"},
            start_new_session=output is None,  # so that Ctrl-C reaches only the parent, which passes it on
        )
        if output:
            output.close()
        if self._is_stopping:  # `stop` was called while the process was being started
            worker.process.terminate()
        worker.started = system.monotonic()

    def _record_death(self, worker: LocalWorker, code: int) -> None:
        """Return the jobs of a dead worker to the queue, and count its death. ``early_deaths``
        counts deaths in a row that came soon after a start.
        """
        died = system.monotonic()
        # A death does not count as early if the worker had claimed a chunk. The chunk may have killed it, and
        # cannot do so forever, because a chunk's retries are bounded. A death by SIGKILL does not count
        # either: a person sends SIGKILL, or the system if a chunk took too much memory.
        own_fault = self._hand_on(worker) == 0 and code != -signal.SIGKILL
        own_fault = own_fault and system.monotonic() - died < _AWAY_SECONDS
        # For a worker that was added, every early death counts: this process may be what takes too much
        # memory, and chunks must not use up their retries on such deaths.
        early = (own_fault or worker.is_added) and died - worker.started < _EARLY_DEATH_SECONDS
        worker.deaths += 1
        worker.early_deaths = worker.early_deaths + 1 if early else 0
        worker.process, worker.died = None, system.monotonic()
        self._on_death(worker, code)

    def _hand_on(self, worker: LocalWorker) -> int:
        # imported here, because most runs never need it
        from rankmill.jobs.protocol.recovery import hand_on_jobs
        from rankmill.jobs.protocol.runs import RunStore
        from rankmill.jobs.runtime.connection import client_for

        with closing(client_for(self._url, self._wait_seconds)) as client:
            store = RunStore(client)
            return max(hand_on_jobs(store, queue, worker.rq_name) for queue in self._queues)


def worker_names(environs: Sequence[Mapping[str, str]]) -> list[str]:
    """Name workers after this host, their accelerator and this process. Equal names get numbers."""
    firsts = [worker_name(_device(environ), str(os.getpid()), environ) for environ in environs]
    return [
        f"{first}-{firsts[:place].count(first) + 1}" if firsts.count(first) > 1 else first
        for place, first in enumerate(firsts)
    ]


def _device(environ: Mapping[str, str]) -> str:
    """Guess the kind of a worker's device, which becomes a part of its name, without importing PyTorch."""
    device = environ.get("RANKMILL_DEVICE", "auto")
    if device != "auto":
        return device
    if "CUDA_VISIBLE_DEVICES" in environ:
        return "cuda"
    return "mps" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "cpu"


def server_environ(url: str) -> dict[str, str]:
    """Return environment variables that connect ``rq`` to the server. Options would do the same, but ``ps``
    shows options to everybody.
    """
    return {"RQ_REDIS_URL": url, "RQ_CONNECTION_CLASS": "rankmill.Connection"}


def worker_command(queues: Sequence[str], name: str) -> list[str]:
    """Return RQ's command line for a ScoringWorker; ``RQ_REDIS_URL`` names the server."""
    options = ["--worker-class", "rankmill.ScoringWorker", "--serializer", "json", "--name", name]
    # Do not import modules from the current directory: without -P, Python would add it, and without --path,
    # RQ would add it.
    return [sys.executable, "-P", "-m", "rq.cli", "worker", *queues, *options, "--path", sys.prefix]
