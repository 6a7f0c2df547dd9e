"""Computes each queue's backlog, which is the work left for its workers, in pairs and in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankmill.cluster.snapshot import QueueState, RunState, Snapshot
from rankmill.jobs.contract.priority import priority_of
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport

RUNS = 1000
"""The backlog is computed from at most this many runs, those with the most recent activity."""

_QUIET_SECONDS = 600
"""A run whose queue has jobs and workers is active for this many seconds after the run's last result. Later,
the run's producer has probably died, so the remaining rows do not count in the backlog.
"""

_ABANDONED_SECONDS = 60
"""A run whose queue has no jobs is active for this many seconds after the run's last result."""

_FORWARD = STAGES.index("forward")


@dataclass(frozen=True)
class Backlog:
    """The work left for the workers of a queue.

    Attributes
    ----------
    pairs
        Number of pairs that are not scored yet.
    seconds
        Time that the live workers need for these pairs. If no worker lives, the time that one worker needs.
        ``None`` if pairs are left, but the speed of the workers is unknown.
    """

    pairs: int
    seconds: float | None


class Backlogs:
    """Computes each queue's backlog from snapshots of the cluster.

    For a queue without workers, the speed and the chunk size from an earlier snapshot are used.
    """

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}
        self._chunk_pairs: dict[str, float] = {}

    def of(self, cluster: Snapshot) -> dict[str, Backlog]:
        return {queue.name: self._of(queue, cluster) for queue in cluster.queues}

    def _of(self, queue: QueueState, cluster: Snapshot) -> Backlog:
        live = [each for each in cluster.workers if each.state != "lost" and queue.name in each.queues]
        reports = [worker.report for worker in live if worker.report]
        takers = [worker.report for worker in live if worker.report and worker.state in {"idle", "busy"}]
        measured = [speed for report in takers or reports if (speed := _speed(report))]
        if measured:
            self._speeds[queue.name] = sum(measured) / len(measured)
        if chunks := sum(report.chunks for report in reports):
            self._chunk_pairs[queue.name] = max(sum(report.pairs for report in reports) / chunks, 1.0)
        runs = [run for run in cluster.runs if run.queue == queue.name]
        pairs = _pairs(queue, runs, self._chunk_pairs.get(queue.name, 1.0))
        speed = self._speeds.get(queue.name)
        if not pairs or speed is None:
            return Backlog(pairs, None if pairs else 0.0)
        # Assume that a worker which has scored nothing yet is as fast as the others.
        return Backlog(pairs, pairs / (speed * max(len(takers), 1)))


def _speed(report: WorkerReport) -> float | None:
    """Return a worker's speed while its models compute, in pairs per second, or ``None`` if it is unknown."""
    seconds = report.stage_seconds[_FORWARD]
    return report.pairs / seconds if report.pairs and seconds > 0 else None


def _pairs(queue: QueueState, runs: Iterable[RunState], chunk_pairs: float) -> int:
    """Estimate how many pairs the queue's workers still have to score.

    A run is active if it has had a result lately, or if its queue has jobs but no workers. All rows that an
    active run has left are counted, even if they are not in the queue yet. A run whose number of rows is
    unknown does not count as active.

    Each waiting job that belongs to no active run counts as `chunk_pairs` pairs. If no run is active, each
    started job counts as `chunk_pairs` pairs, too.
    """
    jobs = queue.waiting + queue.started
    limit = _QUIET_SECONDS if jobs else _ABANDONED_SECONDS
    active = [
        run
        for run in runs
        if run.rows is not None and (run.quiet_seconds < limit or (jobs and not queue.workers))
    ]
    pairs = [max((run.rows or 0) - run.rows_done, 0) for run in active]
    # For a run that is a request, the number of waiting jobs is unknown. The number of pairs that the run has
    # left is used instead, because there cannot be more jobs than pairs. The runs of the started jobs are
    # unknown, too.
    waiting = sum(
        run.waiting if priority_of(run.id) == "bulk" else left
        for run, left in zip(active, pairs, strict=True)
    )
    others = max(queue.waiting - waiting, 0) + (0 if active else queue.started)
    return sum(pairs) + round(others * chunk_pairs)
