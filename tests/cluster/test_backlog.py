"""Seconds of backlog: pairs that are left, by the speed of the workers that are there."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rankmill.cluster.backlog import Backlog, Backlogs
from rankmill.cluster.snapshot import QueueState, RunState, Snapshot, WorkerState
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport


def worker(
    name: str, pairs: int, forward: float, state: Any = "busy", queue: str = "rankmill"
) -> WorkerState:
    stages = [0.0] * len(STAGES)
    stages[STAGES.index("forward")] = forward
    report = WorkerReport(
        device="cpu", started=1, beat=2, pairs=pairs, chunks=pairs // 100, stage_seconds=tuple(stages)
    )
    return WorkerState(name=name, queues=(queue,), state=state, beat_seconds=1, report=report)


def run(
    rows: int | None, done: int, quiet: float = 1, queue: str = "rankmill", waiting: int = 8, kind: str = ""
) -> RunState:
    return RunState(
        id=f"{kind}0af", waiting=waiting, queue=queue, model="demo", created=1, rows=rows, rows_done=done,
        row_errors=0, rows_per_second=None, seconds_left=None, quiet_seconds=quiet,
    )  # fmt: skip


def cluster(workers: list[WorkerState], runs: list[RunState], waiting: int = 1, started: int = 0) -> Snapshot:
    live = sum(each.state in {"idle", "busy"} for each in workers)
    queue = QueueState(
        name="rankmill", waiting=waiting, oldest_seconds=1, started=started, failed=0, workers=live
    )
    return Snapshot(
        at=time.time(), queues=(queue,), workers=tuple(workers), runs=tuple(runs),
        runs_total=len(runs), page=0, page_size=50,
    )  # fmt: skip


TWO = [worker("a", pairs=1000, forward=10), worker("b", pairs=3000, forward=10)]  # 100/s and 300/s


@pytest.mark.parametrize(
    ("workers", "runs", "jobs", "expected"),
    [
        (TWO, [run(10_000, 2000)], 8, Backlog(8000, 20.0)),  # those not submitted yet included
        ([*TWO, worker("new", 0, 0)], [run(10_000, 4000)], 8, Backlog(6000, 10.0)),  # as fast as the others
        ([*TWO, worker("dead", 1, 100, "lost")], [run(10_000, 2000)], 8, Backlog(8000, 20.0)),
        ([*TWO, worker("slow", 1, 100, "drained")], [run(10_000, 2000)], 8, Backlog(8000, 20.0)),
        ([*TWO, worker("of another queue", 1, 100, queue="x")], [run(8000, 0)], 8, Backlog(8000, 20.0)),
        (TWO, [run(8000, 0), run(8000, 0, queue="x"), run(400, 0)], 8, Backlog(8400, 21.0)),
        (TWO, [run(10, 0, waiting=0, kind="r")] * 8, 8, Backlog(80, 0.2)),  # the requests' own pairs
        (TWO, [run(8000, 0, waiting=5)], 8, Backlog(8300, 20.75)),  # and a detached run, of three chunks
        (TWO, [run(None, 5000)], 8, Backlog(800, 2.0)),  # unknown: the chunks in the queue, of 100 each
        (TWO, [run(8000, 0, quiet=700)], 4, Backlog(400, 1.0)),  # its producer is dead
        (TWO, [run(8000, 0, quiet=70)], 0, Backlog(0, 0.0)),  # the same, without any job
        (TWO, [], 0, Backlog(0, 0.0)),
        ([], [run(8000, 0, quiet=700)], 4, Backlog(8000, None)),  # it waits for a first worker
        ([worker("new", 0, 0)], [run(8000, 0)], 4, Backlog(8000, None)),
    ],
)
def test_what_is_left_and_how_long_it_takes(
    workers: list[WorkerState], runs: list[RunState], jobs: int, expected: Backlog
) -> None:
    assert Backlogs().of(cluster(workers, runs, waiting=jobs)) == {"rankmill": expected}


@pytest.mark.parametrize("state", ["gone", "drained"])
def test_without_workers_the_last_speed_counts_for_one(state: str) -> None:
    backlogs = Backlogs()
    backlogs.of(cluster(TWO, []))
    drained = [each.model_copy(update={"state": "drained"}) for each in TWO] if state == "drained" else []
    assert backlogs.of(cluster(drained, [run(8000, 0)])) == {"rankmill": Backlog(8000, 40.0)}
    assert backlogs.of(cluster(drained, [], waiting=8)) == {"rankmill": Backlog(800, 4.0)}


def test_drained_workers_say_how_large_chunks_are() -> None:
    drained = [each.model_copy(update={"state": "drained"}) for each in TWO]
    assert Backlogs().of(cluster(drained, [], waiting=8)) == {"rankmill": Backlog(800, 4.0)}
