"""Processes that need not import their libraries: they are forks of one that has (`tests.harness.forks`).

Nearly all of the CPU time that the start of a worker or of a short command takes is spent on imports.
A fork is a real process: it has its own pid, environment, folder, streams, signals and exit status. Its
parent is the process that it was forked from, and it is in that process's group.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, AnyStr, TextIO

import redis.utils
from execnet.gateway_io import popen_bootstrapline

from rankmill.jobs.system import system
from tests.harness.environ import ENVIRON, FORKS

_MODULES = (
    "rankmill.producer.local.supervisor",
    "rq.cli",
    "rankmill.extensions.lab.offline",
)
"""What rankmill starts as ``python -m``."""

EXECUTED = "TESTS_EXECUTED"
"""Where this variable is set, rankmill's processes are executed, as its users' are: for tests of families."""

OF_WORKERS = "-workers"
"""What ends the address of the process that has torch as well."""

OF_TESTS = "-tests"
"""What ends the address of the process that has what tests import, too: pytest-xdist's are forks of it."""

_XDIST = [sys.executable, "-u", "-c", popen_bootstrapline]
"""What starts a process of pytest-xdist."""

_WITHOUT_TORCH = {"rankmill", "score-file", "score-workers", "rankmill.producer.local.supervisor"}
"""Commands and modules that are forks of the process without it."""

_START_SECONDS = 240

_Popen = subprocess.Popen

_address: list[str] = []
"""Of the processes that fork, once it is known."""


class PreloadedProcess(subprocess.Popen[AnyStr]):
    """A `Popen` of a command of `tests.harness.forks`, ``python -c`` or ``-m``; a fork of that process."""

    _line: socket.socket
    _words: TextIO

    def _execute_child(  # type: ignore[no-untyped-def]  # the parameters of Popen's own, by place
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_,
    ) -> None:  # fmt: skip
        command = list(map(str, args))
        wanted = {
            "command": command,
            "cwd": str(cwd or Path.cwd()),
            "environ": dict(os.environ if env is None else env),
        }
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_server_of(command))
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        socket.send_fds(self._line, [json.dumps(wanted).encode() + b"\n"], streams)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._words = self._line.makefile("r")
        self.pid = int(self._words.readline())
        self._child_created = True

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        """Called by ``poll``, and with a `_deadstate` after this object's life, when its socket may be
        closed.
        """
        if self.returncode is None and self._line.fileno() == -1:
            self.returncode = _deadstate
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


class _Process(PreloadedProcess[AnyStr]):
    """What ``subprocess.Popen`` is in tests: rankmill's own processes are forks, all others are as ever."""

    def _execute_child(self, args, *others) -> None:  # type: ignore[no-untyped-def]
        command = [] if isinstance(args, str) else [str(word) for word in args if word != "-P"]
        environ = os.environ if others[5] is None else others[5]
        ours = len(command) > 2 and command[:2] == [sys.executable, "-m"] and command[2] in _MODULES
        if command == _XDIST:
            super()._execute_child(["pytest", popen_bootstrapline], *others)
        elif ours and not environ.get(EXECUTED):
            super()._execute_child(command[1:], *others)
        else:
            _Popen._execute_child(self, args, *others)  # type: ignore[attr-defined]

    def _internal_poll(self, *others: Any, **named: Any) -> int | None:
        if hasattr(self, "_line"):
            return super()._internal_poll(*others, **named)
        return _Popen._internal_poll(self, *others, **named)  # type: ignore[attr-defined, no-any-return]

    def _wait(self, timeout: float | None) -> int:
        if hasattr(self, "_line"):
            return super()._wait(timeout)
        return _Popen._wait(self, timeout)  # type: ignore[attr-defined, no-any-return]


def install(address: str | None = None) -> None:
    """Let the processes that rankmill starts from this one be forks, and connections be made quickly."""
    _address.extend([address] if address else [])
    redis.utils.get_lib_version = cache(redis.utils.get_lib_version)  # each connection reads it from a file
    subprocess.Popen = system.Popen = _Process  # type: ignore[misc]  # the seam has the first one's class


def start_forks() -> str:
    """Start the processes that fork, and return their address; they end with this one."""
    folder = tempfile.TemporaryDirectory(prefix="rm-")  # short: socket paths are limited
    address = f"{folder.name}/s"
    command = [sys.executable, "-m", "tests.harness.forks", address]
    root = Path(__file__).parents[2]
    log = Path(folder.name, "log")
    with log.open("wb") as said:
        environ = {**ENVIRON, FORKS: address}
        server = _Popen(
            command, stdin=subprocess.PIPE, stderr=said, cwd=root, env=environ, start_new_session=True
        )

    def end() -> None:
        early = server.poll() is not None
        server.communicate()
        if early:
            print(
                f"the process that forks ended with {server.returncode}:\n{log.read_text()}", file=sys.stderr
            )
        folder.cleanup()

    atexit.register(end)
    return address


def _server_of(command: list[str]) -> str:
    """Address of the process that forks for a command, once it does."""
    if not _address:
        _address.append(os.environ.get(FORKS) or start_forks())
    name = command[command[0] == "-m"]
    kind = OF_TESTS if name == "pytest" else "" if name in _WITHOUT_TORCH else OF_WORKERS
    address = _address[0] + kind
    deadline = time.monotonic() + _START_SECONDS
    while not os.path.exists(address):  # noqa: PTH110
        assert time.monotonic() < deadline, "the process that forks has not begun to"
        time.sleep(0.05)
    return address
