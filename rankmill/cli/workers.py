"""``score-workers``, also ``rankmill workers``: start a host's workers and keep them running."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from jobs.errors import RankmillError
from jobs.runtime.connection import connect
from jobs.runtime.hosts import require_worker_packages
from jobs.runtime.logs import about, set_up
from jobs.runtime.patience import redis_errors, waiting
from jobs.runtime.settings import load_settings
from rankmill.cli import options
from rankmill.local.embedded import worker_environs
from rankmill.local.processes import Worker, WorkerPool, WorkersFailed

_LOOK_SECONDS = 0.2

logger = logging.getLogger(__name__)


@options.command("score-workers")
@options.settings("redis_url", "queue", "workers", "threads", "device", "backend", "warm", "log_level")
@options.version
def score_workers(config: str | None, **flags: Any) -> None:
    """Start this host's workers and keep them running.

    There is one for each GPU, or they share the cores. Each is an rq worker of class
    workers.ScoringWorker. One that dies is started again, after a pause
    that grows, and its chunks run elsewhere at once; one that dies again and again at its start ends
    the command with exit code 1. SIGTERM and Ctrl-C let the workers finish the batch in progress and
    hand the rest back; a second one makes them do so at once.
    """
    require_worker_packages()
    settings = load_settings(flags, config)
    server = options.server(settings)
    connect(server, settings.redis_wait_seconds).close()
    set_up(settings.log_level, settings.log_format)
    pool = WorkerPool(
        settings.queue,
        server,
        worker_environs(settings),
        prefix=f"{socket.gethostname()}-{os.getpid()}",
        wait_seconds=settings.redis_wait_seconds,
        on_death=_tell,
    )
    keep(pool)


def keep(pool: WorkerPool) -> None:
    """Look after the workers until told to stop.

    Raises
    ------
    WorkersFailed
        One of them cannot start, or has given up waiting for Redis.
    RedisUnavailable
        What a dead one had claimed cannot be handed on.
    """
    told: list[int] = []

    def stop(signum: int, frame: object) -> None:
        told.append(signum)
        pool.send(signal.SIGTERM)

    def look() -> None:
        if told:
            raise _Told

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        with suppress(_Told), redis_errors(), waiting(look=look):
            while not told:
                hopeless = pool.look_after()
                if hopeless:
                    raise WorkersFailed(_why(hopeless))
                time.sleep(_LOOK_SECONDS)
    except RankmillError:
        pool.send(signal.SIGTERM)
        raise
    finally:
        pool.wait()


class _Told(Exception):
    """A signal has come while Redis was waited for."""


def _why(worker: Worker) -> str:
    """Why there is no going on after this worker's end."""
    if worker.gave_up:
        return f"{worker.name} has given up waiting for Redis; its last lines above say why"
    died = f"has died {worker.early_deaths} times in a row at its start"
    return f"{worker.name} {'cannot start' if worker.refuses else died}; its last lines above say why"


def _tell(worker: Worker, code: int) -> None:
    with about(worker=worker.rq_name):
        logger.warning("worker died with status %d, starting it again", code)
