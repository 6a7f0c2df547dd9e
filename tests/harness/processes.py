"""rankmill's processes: workers, exporters, score-file. Fixtures `workers`, `exporters`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rankmill.jobs.protocol.worker_report import queue_workers
from tests.harness.environ import ALL_ROOTS, ENVIRON, QUICK_LEASE, SWITCH
from tests.harness.preloaded import PreloadedProcess
from tests.harness.servers.valkey import Server
from tests.harness.tools import free_port

StartWorker = Callable[..., "subprocess.Popen[bytes]"]

FAILED = pytest.StashKey[bool]()
"""Whether a test has failed."""


@pytest.fixture
def workers(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartWorker]:
    """Starts worker processes on `server`; what is left of them is killed at the end.

    If the test has failed, they first say what their threads do, and their log is shown with it.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(queue: str = "rankmill", *, ready: bool = True, **options: Any) -> subprocess.Popen[bytes]:
        before = queue_workers(server.client, queue).scoring
        started.append(start_worker(server, queue, tmp_path, **options))
        if ready:
            wait_for(lambda: queue_workers(server.client, queue).scoring - before, started[-1])
        return started[-1]

    yield start
    failed = request.node.stash.get(FAILED, False)
    ended = [process.poll() for process in started]
    for process in started:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGABRT if failed else signal.SIGKILL)
        process.wait()
    if failed and started:
        print(f"the workers had ended with {ended} (None: they ran); their log:")
        print((tmp_path / "worker.log").read_text(errors="replace"))


StartExporter = Callable[..., str]


@pytest.fixture
def exporters(tmp_path: Path) -> Iterator[StartExporter]:
    """Starts exporters and gives their URLs; they end well when told to. ``before``: see `rankmill_words`."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "exporter.log"

    def start(redis_url: str, port: int | None = None, before: str = "", **environ: str) -> str:
        address = f"127.0.0.1:{port or free_port()}"
        command = [*rankmill_words(before), "exporter", "--redis", redis_url, "--address", address]
        with log.open("wb") as out:
            started.append(PreloadedProcess(command, stdout=out, stderr=out, env={**ENVIRON, **environ}))
        wait_for(lambda: " at http://" in log.read_text(), started[-1])
        return address_in(log.read_text().splitlines()[-1])

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert not log.exists() or "Traceback" not in log.read_text()


def address_in(line: str) -> str:
    """The address that a line says, with which a server starts."""
    *_, address = re.finditer(r" at (http://[^\s\"]+)", line)
    return address[1]


def rankmill_words(before: str = "") -> list[str]:
    """How a command of rankmill begins. Its process first runs Python code, to make an interval shorter."""
    code = f"{before}; from rankmill.cli.main import rankmill; rankmill()"
    return ["python", "-c", code] if before else ["rankmill"]


def start_worker(
    server: Server,
    queue: str,
    directory: Path,
    worker_class: str = "rankmill.ScoringWorker",
    serializer: str = "json",
    environ: dict[str, str] | None = None,
    name: str | None = None,
) -> subprocess.Popen[bytes]:
    """RQ's own command line, as docs/guides/cluster.md shows it; its log goes to ``worker.log``.

    It runs in a fork that has the libraries (`tests.harness.preloaded`); tests of families of processes,
    of ``rq worker-pool`` and ``--burst`` start it from the beginning.
    """
    url = server.worker_url if "ScoringWorker" in worker_class else ""
    options = ["--worker-class", worker_class, "--serializer", serializer, "--url", url or server.url]
    command = ["rq", "worker", queue, *options, *(["--name", name] if name else [])]
    with (directory / "worker.log").open("ab") as log:
        return PreloadedProcess(
            command,
            cwd=directory,
            env={**ENVIRON, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[Any] | None = None, seconds: float = 180
) -> None:
    """Wait until `condition` holds; fails if it never does or `process` ends first."""
    deadline = time.monotonic() + seconds
    pause = 0.002
    while not condition():
        assert process is None or process.poll() is None, "the process ended early"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads of this process, and of those that the test starts, take turns every 10 µs, not every 5 ms.

    What two threads change without a lock is seen then, which else one process of thousands meets.
    """
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    monkeypatch.setitem(ENVIRON, SWITCH, "1e-5")
    yield
    sys.setswitchinterval(seconds)


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """What `err` says, a line each: of JSON, the message."""
        return messages_in(self.err)

    @property
    def complaints(self) -> list[str]:
        """What score-file itself said went wrong, a line each; the rest of `err` is its log."""
        return [line for line in self.messages if line.startswith("score-file: ")]

    @property
    def summary(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        summary: dict[str, Any] = json.loads(self.out)
        return summary


def messages_in(err: str) -> list[str]:
    """What a command has written to standard error, a line each: of JSON, the message."""
    lines = err.splitlines()
    return [json.loads(line)["message"] if line.startswith("{") else line for line in lines]


def score_file(
    *arguments: object, cwd: Path | None = None, environ: dict[str, str] | None = None, timeout: float = 240
) -> Outcome:
    """Run ``score-file`` as `run_command` does; no failure of it may be a traceback."""
    done = run_command("score-file", *arguments, cwd=cwd, environ=environ, timeout=timeout)
    assert "Traceback" not in done.err, done.err
    return done


def run_command(
    *words: object, cwd: Path | None = None, environ: Mapping[str, str] | None = None, timeout: float = 240
) -> Outcome:
    """Run a real command to its end, as `start_command` starts it."""
    process = start_command(*words, cwd=cwd, environ=environ)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Outcome(process.returncode, out, err)


def start_command(
    *words: object, cwd: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a real command in a process of its own: a fork that has the libraries."""
    return PreloadedProcess(
        list(map(str, words)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**ENVIRON, **(environ or {})},
    )


StartRunner = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def runners(tmp_path: Path) -> Iterator[StartRunner]:
    """Starts runners with short leases, whose log is ``runner.log``; what is left of them ends at the end."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "runner.log"

    def start(
        server: Server,
        *options: str,
        cwd: Path = tmp_path,
        environ: Mapping[str, str] | None = None,
        before: str = "",
    ) -> subprocess.Popen[bytes]:
        ready = log.read_text().count("takes runs of queue") if log.exists() else 0
        with log.open("ab") as out:
            command = [*rankmill_words(before), "runner", "--redis", server.url, *options]
            own = {"RANKMILL_METRICS_ADDRESS": "none", **ALL_ROOTS, **QUICK_LEASE, **(environ or {})}
            env = {**ENVIRON, **own}
            started.append(PreloadedProcess(command, cwd=cwd, stdout=out, stderr=out, env=env))
        wait_for(lambda: log.read_text().count("takes runs of queue") > ready, started[-1])
        return started[-1]

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.wait(timeout=60)
    assert not log.exists() or "Traceback" not in log.read_text()
