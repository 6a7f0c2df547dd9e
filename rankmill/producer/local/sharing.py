"""Adds worker processes for a GPU if one process prepares batches more slowly than the GPU scores them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from statistics import mean

from redis import RedisError

from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport, known_reports
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.system import system
from rankmill.producer.local.processes import WorkerProcesses

LOOK_SECONDS = 6.0
"""Seconds between two readings of the workers' reports. A reading without new reports does not count."""

_LOOKS = 3
"""A GPU gets another worker only after this many successive readings of the reports. Their means decide."""

_BUSY = 0.9
"""No worker is added for a GPU that computes for at least this share of the time: the GPU is the limit."""

_MAY_WAIT = 0.05
"""If a worker waits for work for more than this share of the time, no worker is added."""

_GAIN = 1.05
"""After a worker was added, another one is added only if the GPU's pairs per second have grown by this
factor.
"""

_ROOM = 0.9
"""Share of a GPU's memory that all processes together may take. The memory of a new process is estimated as
the mean memory of the present processes.
"""

_MOST = 4

_WAIT = STAGES.index("wait")


class GpuSharing:
    """Adds worker processes for those GPUs of this host that wait for their workers to prepare batches.

    If an added worker dies repeatedly or refuses to start, no further worker is ever added for this worker's
    GPU.

    Parameters
    ----------
    processes
        This host's workers.
    url
        URL of the server, which has the workers' reports.
    say
        Called with a line of text when a process is added.
    """

    def __init__(self, processes: WorkerProcesses, url: str, say: Callable[[str], None]) -> None:
        self._processes, self._url, self._say = processes, url, say
        gpus = {worker.gpu for worker in processes.workers if worker.gpu}
        self._gpus = {gpu: SharedGpu(cores() // (2 * len(gpus))) for gpu in gpus}
        self._due = system.monotonic() + LOOK_SECONDS

    def look(self) -> None:
        """Read the workers' reports, at most once in `LOOK_SECONDS`, and add a worker for each GPU that would
        gain enough by it.
        """
        if not self._gpus or system.monotonic() < self._due:
            return
        self._due = system.monotonic() + LOOK_SECONDS
        try:
            with closing(client_for(self._url, 0)) as client:
                reports = known_reports(client, [worker.rq_name for worker in self._processes.workers])
        except (RedisError, RankmillError):
            return  # Redis does not serve; other code waits for it, and reports the failure
        for gpu, shared in self._gpus.items():
            mine = [worker for worker in self._processes.workers if worker.gpu == gpu]
            if why := shared.see({worker.rq_name: reports.get(worker.rq_name) for worker in mine}):
                self._processes.add_beside(mine)
                self._say(f"{len(mine) + 1} workers share GPU {gpu}: {why}")


class SharedGpu:
    """Decides by the reports of the workers that share a GPU whether another worker is added.

    Parameters
    ----------
    most
        The largest number of workers for this GPU; `_MOST` counts instead if it is smaller.
    """

    def __init__(self, most: int) -> None:
        self._most = min(most, _MOST)
        self._before: dict[str, WorkerReport] = {}
        self._looks: deque[tuple[float, float]] = deque(maxlen=_LOOKS)
        self._speed_before = 0.0
        """Pairs per second when a process was last added."""
        self._count = 0
        """Number of the GPU's workers after the last worker was added. If there are fewer workers now, the
        added worker has died repeatedly or refused to start.
        """
        self._is_full = False

    def see(self, given: Mapping[str, WorkerReport | None]) -> str | None:
        """Take the latest reports of the GPU's workers. Return in words why another worker should be added,
        or ``None`` if none should be.
        """
        reports = {name: report for name, report in given.items() if report is not None}
        self._is_full |= len(given) < self._count
        if any(
            name in self._before and report.beat == self._before[name].beat
            for name, report in reports.items()
        ):
            return None  # no new report: ``heartbeat_seconds`` may exceed `LOOK_SECONDS`
        speed = self._speed(reports) if len(reports) == len(given) else None
        uses = [report.gpu.use for report in reports.values() if report.gpu and report.gpu.use is not None]
        self._before = dict(reports)
        if speed is None or not uses:
            self._looks.clear()
            return None
        self._looks.append((mean(uses), speed))
        if len(self._looks) < _LOOKS or self._is_full:
            return None
        use, speed = (mean(values) for values in zip(*self._looks, strict=True))
        self._looks.clear()
        if len(reports) > 1 and speed < _GAIN * self._speed_before:
            self._is_full = True
        if self._is_full or use >= _BUSY or len(reports) >= self._most or not _has_room(reports):
            return None
        self._speed_before, self._count = speed, len(given) + 1
        host, device = (1e6 * share / speed for share in (len(reports), use))
        return f"the host needs {host:.0f} µs for a pair, the device {device:.0f}"

    def _speed(self, reports: Mapping[str, WorkerReport]) -> float | None:
        """Return the pairs per second of all of the GPU's workers since their previous reports. Returns
        ``None`` if one of the workers had too little work or has loaded a model, or if its host's clock has
        gone back.
        """
        total = 0.0
        for name, report in reports.items():
            before = self._before.get(name)
            if before is None or report.beat <= before.beat or report.model_loads != before.model_loads:
                return None
            seconds, pairs = report.beat - before.beat, report.pairs - before.pairs
            waited = report.stage_seconds[_WAIT] - before.stage_seconds[_WAIT]
            if pairs <= 0 or waited > _MAY_WAIT * seconds:
                return None
            total += pairs / seconds
        return total or None


def _has_room(reports: Mapping[str, WorkerReport]) -> bool:
    gpus = [report.gpu for report in reports.values() if report.gpu]
    used, size = max(gpu.memory_used for gpu in gpus), gpus[0].memory_size
    return used * (1 + 1 / len(reports)) <= _ROOM * size
