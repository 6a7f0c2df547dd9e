"""Says in one sentence whether all is well in a cluster, and lists faults with advice, the worst first."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict

from rankmill.cluster.snapshot import DRAINED, QueueState, RunState, ServerMemory, Snapshot, WorkerState
from rankmill.cluster.watch import ClusterFault, waiting, watches
from rankmill.jobs.contract.job import RESUME
from rankmill.jobs.contract.shown import counted

_KINDS = (
    "wrong_scores", "refuses_writes", "no_workers", "suspended", "nearly_full", "evicts", "stuck_run",
    "lost_worker", "refusing_worker", "slow_worker", "set_aside", "failed_jobs", "damaged",
    "extension",
)  # fmt: skip

_WITHOUT_REPORTS = {
    "wrong_scores", "refuses_writes", "suspended", "nearly_full", "evicts", "set_aside", "failed_jobs",
    "damaged", "extension",
}  # fmt: skip
"""Kinds of faults that are shown while the server takes no writes. The other kinds are not: processes cannot
write their reports then, and all workers look lost.
"""

QUIET_SECONDS = 15.0
"""Seconds without a result after which a run is stuck, if its queue has jobs and a worker is free."""

MAX_REASON_CHARS = 300


class Verdict(BaseModel):
    """The verdict on a cluster: ``sentence`` says that all is well, or names the worst of the ``faults``."""

    model_config = ConfigDict(frozen=True)

    sentence: str
    faults: tuple[ClusterFault, ...]


class Told(Snapshot):
    """A snapshot of a cluster, and the verdict on it."""

    verdict: Verdict


def fault_kinds() -> list[str]:
    """Return the kinds of faults that a cluster may have, including those of extensions, the worst first."""
    kinds = list(_KINDS)
    for watch in watches().values():
        for kind, worse in watch.kinds.items():
            kinds.insert(kinds.index(worse) + 1 if worse in kinds else len(kinds), kind)
    return kinds


def with_verdict(cluster: Snapshot) -> Told:
    """Return the snapshot of a cluster with the verdict on it, for JSON."""
    return Told(**dict(cluster), verdict=verdict(cluster))


def verdict(cluster: Snapshot) -> Verdict:
    """Find the faults of a cluster in its snapshot, and say in one sentence whether all is well."""
    kinds = fault_kinds()
    found = [fault for fault in _faults(cluster) if not cluster.trouble or fault.kind in _WITHOUT_REPORTS]
    faults = tuple(sorted(found, key=lambda fault: kinds.index(fault.kind)))
    if not faults:
        return Verdict(sentence=f"All is well: {_at_work(cluster)}", faults=())
    more = len(faults) - 1
    rest = f" (and {counted(more, 'other fault')})" if more else ""
    return Verdict(sentence=f"{faults[0].text}{rest}", faults=faults)


def _at_work(cluster: Snapshot) -> str:
    workers = sum(worker.state in {"idle", "busy"} for worker in cluster.workers)
    at_work = f"{counted(workers, 'worker')}, {counted(cluster.runs_total, 'run')}"
    speed = sum(run.rows_per_second or 0.0 for run in cluster.runs)
    has_all = len(cluster.runs) == cluster.runs_total
    return f"{at_work}, {speed:,.0f} pairs/s" if speed and has_all else at_work


def _faults(cluster: Snapshot) -> Iterator[ClusterFault]:
    for stopped in cluster.last_reports:
        yield ClusterFault(
            kind="wrong_scores",
            text=f"{stopped.reason}; it has stopped, {(cluster.at - stopped.at) / 3600:.1f} h ago",
            remedy=f"score again what it has answered: {', '.join(stopped.runs) or 'no run'}; then rankmill "
            f"workers forget {shlex.quote(stopped.worker)}",
        )
    if cluster.trouble:
        yield ClusterFault(
            kind="refuses_writes",
            text=f"Redis takes no writes, and all wait for it ({cluster.trouble.rstrip('.')})",
            remedy="see the log of the server; when its memory is full, raise maxmemory or cancel runs; if "
            "it is a replica, give all processes the address of the master",
        )
    if cluster.suspended:
        yield ClusterFault(
            kind="suspended",
            text="No worker takes chunks, because rq suspend was called",
            remedy=RESUME,
        )
    if cluster.memory:
        yield from _of_memory(cluster.memory)
    lost = {queue for worker in cluster.workers if worker.state == "lost" for queue in worker.queues}
    for queue in cluster.queues:
        yield from _of_queue(queue, cluster.workers, has_lost=queue.name in lost)
    for seen in cluster.extensions.values():
        yield from seen.faults()
    for run in cluster.runs:
        if not cluster.suspended and _is_stuck(run, cluster.queues, cluster.workers):
            yield ClusterFault(
                kind="stuck_run",
                text=f"Run {run.id[:12]} has no result for {run.quiet_seconds:.0f} s, and workers are free",
                remedy="see the workers' logs; rankmill jobs lists what has failed",
            )
    for worker in cluster.workers:
        yield from _of_worker(worker)
    if cluster.set_aside:
        last = cluster.set_aside[0]
        yield ClusterFault(
            kind="set_aside",
            text=f"{counted(len(cluster.set_aside), 'job')} could not be read, the last one: {last.reason}",
            remedy="rankmill jobs lists them, retries or clears them",
        )
    if cluster.damaged:
        keys = counted(len(cluster.damaged), "key")
        yield ClusterFault(
            kind="damaged",
            text=f"{keys} in Redis cannot be read, such as {cluster.damaged[0].key}",
            remedy="delete what is damaged; rankmill status lists the keys and the reasons",
        )


def _of_memory(memory: ServerMemory) -> Iterator[ClusterFault]:
    evicts = memory.policy != "noeviction"
    if memory.is_nearly_full and not evicts:
        yield ClusterFault(
            kind="nearly_full",
            text=f"Redis is nearly full: it uses {memory.used >> 20:,} of {memory.limit >> 20:,} MiB",
            remedy="raise maxmemory, lower window_mib, or cancel runs; chunks that do not fit wait",
        )
    if memory.evicted and evicts:
        yield ClusterFault(
            kind="evicts",
            text=f"Redis has evicted {counted(memory.evicted, 'key')} (maxmemory-policy {memory.policy})",
            remedy="set maxmemory-policy noeviction, or it loses chunks and results",
        )


def _of_queue(queue: QueueState, workers: Iterable[WorkerState], *, has_lost: bool) -> Iterator[ClusterFault]:
    # Started jobs count as waiting, because their workers may be dead, and RQ may have forgotten the workers.
    # Started jobs do not count in two cases. If the queue has a lost worker, that is a fault of its own. If
    # the queue has draining workers, they may still finish the jobs.
    waits = queue.waiting + (0 if has_lost or queue.drained else queue.started)
    if waits and not queue.workers:
        whom = "all workers are drained" if queue.drained else "no workers"
        start = f"start some with score-workers --queue {shlex.quote(queue.name)}"
        drained = [each.name for each in workers if each.state in DRAINED and queue.name in each.queues]
        yield ClusterFault(
            kind="no_workers",
            text=f"Nothing is scored in queue {queue.name}: {whom}, {waiting(waits, 'chunk')}",
            remedy=f"rankmill workers resume {shlex.quote(drained[0])} makes one take chunks"
            if drained
            else start,
        )
    if queue.failed:
        yield ClusterFault(
            kind="failed_jobs",
            text=f"{counted(queue.failed, 'job')} of queue {queue.name} failed for good",
            remedy="rankmill jobs lists them, retries or clears them",
        )


def _of_worker(worker: WorkerState) -> Iterator[ClusterFault]:
    if worker.state == "lost":
        yield ClusterFault(
            kind="lost_worker",
            text=f"Worker {_placed(worker)} has died, or cannot reach Redis",
            remedy="see its log, and start another; other workers get its chunks",
        )
    if worker.report and worker.report.refusals:
        first, *more = worker.report.refusals
        rest = f" (and {len(more):,} more)" if more else ""
        yield ClusterFault(
            kind="refusing_worker",
            text=f"Worker {_placed(worker)} leaves chunks to other workers: {first[:MAX_REASON_CHARS]}{rest}",
            remedy="mend on its host what it names; it tries again by itself",
        )
    if worker.is_slow:
        times = 1 / max(worker.relative_pace or 0.0, 1e-3)
        yield ClusterFault(
            kind="slow_worker",
            text=f"Worker {_placed(worker)} is slow: {times:,.0f} times the time for a token of its peers",
            remedy="see what else runs on its host; rankmill workers drain "
            f"{shlex.quote(worker.name)} takes it out",
        )


def _placed(worker: WorkerState) -> str:
    """Return the worker's name, with its host and process id if the name does not contain the host."""
    if worker.host is None or worker.host in worker.name:
        return worker.name
    return f"{worker.name} (host {worker.host}, process {worker.pid})"


def _is_stuck(run: RunState, queues: Iterable[QueueState], workers: Iterable[WorkerState]) -> bool:
    if run.quiet_seconds < QUIET_SECONDS:
        return False
    is_there = any(queue.name == run.queue and (queue.waiting or queue.started) for queue in queues)
    return is_there and any(run.queue in worker.queues and _is_free(worker) for worker in workers)


def _is_free(worker: WorkerState) -> bool:
    """Return whether a worker is idle and would take any chunk.

    A worker that refuses some runs is not free: it may be idle while chunks of these runs wait.
    """
    report = worker.report
    return worker.state == "idle" and not (report and (report.doing or report.refusals))
