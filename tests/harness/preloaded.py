"""Commands that need not import their libraries: they run in a fork of a process that has.

Nearly all of the CPU time that the start of a worker or of a short command takes is spent on imports.
A fork is a real process: it has its own pid, environment, folder, streams, signals and exit status.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, AnyStr, TextIO

from tests.harness.environ import ENVIRON

_LIBRARIES = (
    "rq.cli.cli",
    "fastapi",
    "redis",
    "numpy",
    "pyarrow",
    "pydantic",
    "opentelemetry.trace",
    "prometheus_client",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.json",
    "pyarrow.parquet",
    "rich.console",
    "rich.logging",
    "rich.progress",
    "rich.table",
    "sqlite3",
    "yaml",
    "openvino",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "uvicorn",
)
"""None of rankmill's own modules: every process imports those anew."""

_COMMANDS = {
    "rq": ("rq.cli.cli", "main"),
    "score-file": ("rankmill.cli.score", "score_file"),
    "score-workers": ("rankmill.cli.workers", "score_workers"),
    "rankmill": ("rankmill.cli.main", "rankmill"),
}
"""Module and function of each command, as its script in the commands' folder has them."""


class PreloadedProcess(subprocess.Popen[AnyStr]):
    """A `Popen` of one of `_COMMANDS` or ``python -c``, whose parent is the process it was forked from."""

    _line: socket.socket
    _words: TextIO

    def _execute_child(  # type: ignore[no-untyped-def]  # the parameters of Popen's own, by place
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_,
    ) -> None:  # fmt: skip
        wanted = {
            "command": list(map(str, args)),
            "cwd": str(cwd or Path.cwd()),
            "environ": dict(os.environ if env is None else env),
        }
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_server())
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        socket.send_fds(self._line, [json.dumps(wanted).encode() + b"\n"], streams)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._words = self._line.makefile("r")
        self.pid = int(self._words.readline())
        self._child_created = True

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        """Called by ``poll`` and at the end of this object's life."""
        return self._end(0)

    def _wait(self, timeout: float | None) -> int:
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
    """Fork the process and say how it ends; returns in the process."""
    message, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
    while not message.endswith(b"\n"):
        message += line.recv(1 << 20)
    wanted: dict[str, Any] = {**json.loads(message), "streams": streams}
    pid = os.fork()
    if not pid:
        return wanted
    for stream in streams:
        os.close(stream)  # its reader waits until nobody can write
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
    for own, given in enumerate(wanted["streams"]):
        os.dup2(given, own)
        os.close(given)
    tempfile.tempdir = None
    vars(sys.modules["__main__"])["__package__"] = None  # as a script's: click takes a program's name from it
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
    name, *arguments = wanted["command"]
    if name == "python":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
        return 0
    module, function = _COMMANDS[name]
    return int(getattr(importlib.import_module(module), function)() or 0)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
