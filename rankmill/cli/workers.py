"""``score-workers``, also ``rankmill workers``: start a host's workers and keep them running."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from typing import Any

from jobs.runtime.connection import connect
from jobs.runtime.logs import about, set_up
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
    settings = load_settings(flags, config)
    server = options.server(settings)
    connect(server).close()
    set_up(settings.log_level, settings.log_format)
    prefix = f"{socket.gethostname()}-{os.getpid()}"
    environs = worker_environs(settings)
    keep(WorkerPool(settings.queue, server, environs, prefix=prefix, on_death=_tell))


def keep(pool: WorkerPool) -> None:
    """Look after the workers until told to stop.

    Raises
    ------
    WorkersFailed
        One of them cannot start.
    """
    told: list[int] = []

    def stop(signum: int, frame: object) -> None:
        told.append(signum)
        pool.send(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not told:
        hopeless = pool.look_after()
        if hopeless:
            pool.send(signal.SIGTERM)
            pool.wait()
            died = f"has died {hopeless.early_deaths} times in a row at its start"
            how = "cannot start" if hopeless.refuses else died
            raise WorkersFailed(f"{hopeless.name} {how}; its last lines above say why")
        time.sleep(_LOOK_SECONDS)
    pool.wait()


def _tell(worker: Worker, code: int) -> None:
    with about(worker=worker.rq_name):
        logger.warning("worker died with status %d, starting it again", code)
