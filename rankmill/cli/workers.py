"""``score-workers``, also ``rankmill workers start``: start a host's workers and keep them running."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import suppress

from rankmill.cli import options
from rankmill.cli.common import version
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.local.embedded import worker_environs
from rankmill.producer.local.processes import LocalWorker, WorkerProcesses, WorkersFailed, worker_names
from rankmill.producer.local.sharing import GpuSharing

_LOOK_SECONDS = 0.2

logger = logging.getLogger(__name__)


@options.command("score-workers")
@options.settings(
    "redis_url", "queue", "workers", "threads", "device", "backend", "warm", "log_level", logs=True
)
@version
def score_workers(settings: Settings) -> None:
    """Start this host's workers and keep them running.

    If --queue names several queues, separated by commas, jobs of the first one come first.

    The default is one worker for each GPU, or one worker that uses all CPU cores. If the workers of a GPU
    prepare batches more slowly than the GPU scores them, the command adds workers for this GPU: at most four
    share it, and its memory and the CPU cores must suffice. With --workers, the number is fixed. Each worker
    is an rq worker of class rankmill.ScoringWorker. A worker that dies is started again after a pause, and
    other workers get its chunks at once. If a worker dies repeatedly at its start, the command ends with exit
    code 1. If a worker that the command has added for a GPU dies repeatedly, only this worker is given up.
    After SIGTERM or Ctrl-C the workers finish the batches in progress and return the rest of their chunks to
    the queue. After a second signal the workers return all of their chunks immediately.
    """
    require_worker_packages()
    server = options.server(settings)
    connect(server, settings.redis_wait_seconds).close()
    environs = worker_environs(settings)
    processes = WorkerProcesses(
        [name.strip() for name in settings.queue.split(",") if name.strip()],
        server,
        environs,
        names=worker_names(environs),
        wait_seconds=settings.redis_wait_seconds,
        on_death=_log_death,
        on_given_up=_log_given_up,
    )
    sharing = GpuSharing(processes, server, logger.info)
    keep(processes, sharing.look if settings.workers == "auto" else lambda: None)


def keep(processes: WorkerProcesses, share_gpus: Callable[[], None]) -> None:
    """Keep this host's workers running until SIGTERM or SIGINT. `share_gpus` is called several times a
    second, and may add workers.

    Raises
    ------
    WorkersFailed
        A worker cannot start, has died several times at its start, or has given up waiting for Redis.
    RedisUnavailable
        The jobs that a dead worker had claimed cannot be returned to the queue.
    """
    signals: list[int] = []

    def stop(signum: int, frame: object) -> None:
        signals.append(signum)
        processes.stop()

    def check_signals() -> None:
        if signals:
            raise _Stopped

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        with suppress(_Stopped), redis_errors(), waiting(look=check_signals):
            while not signals:
                failed = processes.restart_dead()
                if failed:
                    raise WorkersFailed(_why(failed))
                share_gpus()
                system.sleep(_LOOK_SECONDS)
    except Exception:
        processes.stop()
        raise
    finally:
        processes.wait()


class _Stopped(Exception):
    """Raised when a signal arrives while the command waits for Redis."""


def _why(worker: LocalWorker) -> str:
    if worker.gave_up:
        return f"{worker.name} has given up waiting for Redis; its last lines above say why"
    died = f"has died {worker.early_deaths} times in a row at its start"
    return f"{worker.name} {'cannot start' if worker.refuses else died}; its last lines above say why"


def _log_death(worker: LocalWorker, code: int) -> None:
    with about(worker=worker.rq_name):
        logger.warning("worker died with status %d, starting it again", code)


def _log_given_up(worker: LocalWorker) -> None:
    logger.warning("%s; the other workers go on without it", _why(worker))
