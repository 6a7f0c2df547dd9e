"""The command that keeps a host's workers running."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from typing import Any

import click

from jobs.errors import RankmillError
from jobs.runtime.connection import connect
from jobs.runtime.logs import about, set_up
from jobs.runtime.settings import load_settings
from rankmill.cli.exits import EXIT_USAGE, fail, server_of
from rankmill.local.embedded import worker_environs
from rankmill.local.processes import Worker, WorkerPool

_LOOK_SECONDS = 0.2

logger = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--redis", "redis_url", help="The server; default: REDIS_URL.")
@click.option("--queue", help="The queue's name.")
@click.option("--workers", help="How many; default: one for each GPU, else one.")
@click.option("--threads", help="CPU threads of each; default: its share of the cores.")
@click.option("--device", help="auto, cpu, cuda or mps.")
@click.option("--backend", help="auto, torch, openvino, onnx or mlx.")
@click.option("--warm", help="Models to load at the start, with commas between them.")
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--config", help="YAML file of settings.")
@click.version_option(package_name="rankmill")
def score_workers(config: str | None, **flags: Any) -> None:
    """Start this host's workers, one for each GPU or sharing the cores, and keep them running.

    Each is an rq worker of class workers.ScoringWorker. One that dies is started again, after a pause
    that grows, and its chunks run elsewhere at once; one that dies again and again at its start ends
    the command with exit code 1. SIGTERM and Ctrl-C let the workers finish the batch in progress and
    hand the rest back; a second one makes them do so at once.
    """
    try:
        settings = load_settings(flags, config)
        server = server_of(settings)
        connect(server).close()
    except RankmillError as error:
        fail("score-workers", error, EXIT_USAGE)
    set_up(settings.log_level, settings.log_format)
    prefix = f"{socket.gethostname()}-{os.getpid()}"
    environs = worker_environs(settings)
    pool = WorkerPool(settings.queue, server, environs, prefix=prefix, on_death=_tell)
    sys.exit(keep(pool))


def keep(pool: WorkerPool) -> int:
    """Look after the workers until told to stop; the exit code."""
    told: list[int] = []

    def stop(signum: int, frame: object) -> None:
        told.append(signum)
        pool.send(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not told:
        hopeless = pool.look_after()
        if hopeless:
            died = f"has died {hopeless.early_deaths} times in a row at its start"
            click.echo(
                f"score-workers: {hopeless.name} {'cannot start' if hopeless.refuses else died}; "
                "its last lines above say why",
                err=True,
            )
            pool.send(signal.SIGTERM)
            pool.wait()
            return 1
        time.sleep(_LOOK_SECONDS)
    pool.wait()
    return 0


def _tell(worker: Worker, code: int) -> None:
    with about(worker=worker.rq_name):
        logger.warning("worker died with status %d, starting it again", code)
