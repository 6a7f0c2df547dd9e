"""rankmill's processes: workers, exporters, score-file. Fixtures `workers`, `exporters`."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.store.worker_report import queue_workers
from tests.harness.environ import BIN, ENVIRON
from tests.harness.preloaded import PreloadedProcess
from tests.harness.servers import Server
from tests.harness.tools import free_port

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
    """RQ's own command line, as the README shows it; its log goes to ``worker.log``.

    It runs in a fork that has the libraries (`tests.harness.preloaded`); tests of the embedded mode,
    of score-workers, ``rq worker-pool`` and ``--burst`` start it from the beginning.
    """
    options = ["--worker-class", worker_class, "--serializer", serializer, "--url", server.url]
    command = ["rq", "worker", queue, *options, *(["--name", name] if name else [])]
    environ = {**ENVIRON, **(environ or {})}
    return PreloadedProcess(command, cwd=directory, environ=environ, log=directory / "worker.log")


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
