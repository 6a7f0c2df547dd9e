"""Worker processes that need not import their libraries: RQ's command line in a fork of a process that has.

Of the 4 s of CPU time that a worker's start takes, the imports are nearly all. What is asked for over a
Unix socket runs as a real process: its own pid, environment, folder, log, signals and exit status.

    python -m tests.harness.preloaded SOCKET    # serves until its standard input closes
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.harness.environ import ENVIRON

_LIBRARIES = (
    "rq.cli.cli",
    "redis",
    "numpy",
    "pyarrow",
    "pydantic",
    "opentelemetry.trace",
    "prometheus_client",
    "openvino",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
)
"""None of rankmill's own modules: a worker imports those anew."""


class PreloadedProcess(subprocess.Popen[bytes]):
    """A process like any `Popen`, but that its parent is the one it was forked from."""

    _child_created = False  # what Popen's destructor asks

    def __init__(
        self, command: Sequence[str], *, cwd: Path, environ: Mapping[str, str], log: Path | str
    ) -> None:
        self.args, self.returncode = command, None
        self.stdin = self.stdout = self.stderr = None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_server())
        wanted = {"command": command, "cwd": str(cwd), "environ": dict(environ), "log": str(log)}
        self._line.sendall(json.dumps(wanted).encode() + b"\n")
        self._words = self._line.makefile("r")
        self.pid = int(self._words.readline())

    def poll(self) -> int | None:
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._end(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _end(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], seconds)[0]:
            self.returncode = int(self._words.readline())
            self._words.close()
            self._line.close()
        return self.returncode


@functools.cache
def _server() -> str:
    """Address of the process that forks; it ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="rm-")  # short: socket paths are limited
    address = f"{folder.name}/s"
    command = [sys.executable, "-m", "tests.harness.preloaded", address]
    root = Path(__file__).parents[2]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root, env=ENVIRON, start_new_session=True)

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    while not os.path.exists(address):  # noqa: PTH110
        assert server.poll() is None, "the process that forks workers ended early"
        time.sleep(0.05)
    return address


def _serve(address: str) -> dict[str, Any] | None:
    """Fork for each connection; returns in the worker, with what is wanted of it, and at the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".new")
        listener.listen()
        Path(address + ".new").rename(address)
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [], 1)[0]):
            _reap(os.WNOHANG)
            if not ready:
                continue
            line, _ = listener.accept()
            with line:
                if not os.fork():
                    listener.close()
                    return _watch(line)
    _reap(os.WNOHANG)
    os.killpg(0, signal.SIGKILL)  # with this process all that a suite which was killed has left
    return None


def _watch(line: socket.socket) -> dict[str, Any]:
    """Fork the worker and say how it ends; returns in the worker."""
    with line.makefile("r") as words:
        wanted: dict[str, Any] = json.loads(words.readline())
    pid = os.fork()
    if not pid:
        return wanted
    line.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # nobody waits
        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _reap(options: int) -> None:
    """Take note of those that have ended, their CPU time included."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _become(wanted: dict[str, Any]) -> None:
    """Make this process what an exec of the command would make it, but for the modules it has."""
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(log)
    os.close(nothing)
    sys.argv = wanted["command"]
    random.seed()


def _main(address: str) -> int:
    for name in _LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    wanted = _serve(address)
    if wanted is None:
        return 0
    _become(wanted)
    from rq.cli.cli import main

    return int(main() or 0)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
