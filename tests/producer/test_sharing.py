"""Further workers for a GPU that waits for its host, by the reports that workers write."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.worker_report import (
    STAGES,
    GpuReport,
    WorkerReport,
    announce_worker,
    queue_workers,
)
from rankmill.producer.local.processes import WorkerProcesses
from rankmill.producer.local.sharing import GpuSharing, SharedGpu
from tests.conftest import Server, wait_for
from tests.harness.preloaded import EXECUTED

GIB = 2**30


def reports(
    use: float, speed: float, *, workers: int = 1, wait: float = 0.0, used: int = 10 * GIB
) -> Iterator[dict[str, WorkerReport | None]]:
    """Reports of workers that score `speed` pairs a second together, one every five seconds."""
    beat = 0.0
    while True:
        beat += 5.0
        seconds = tuple(wait * beat if stage == "wait" else 0.0 for stage in STAGES)
        report = WorkerReport(
            device="cuda",
            started=1.0,
            beat=beat,
            pairs=round(speed * beat / workers),
            stage_seconds=seconds,
            gpu=GpuReport(use=use, memory_used=used, memory_size=80 * GIB, celsius=None),
        )
        yield {f"w{number}": report for number in range(workers)}


def said(gpu: SharedGpu, seen: Iterator[Mapping[str, WorkerReport | None]], looks: int = 12) -> list[str]:
    return [why for why in (gpu.see(next(seen)) for _ in range(looks)) if why]


def test_a_gpu_that_waits_for_its_worker_gets_another() -> None:
    gpu = SharedGpu(most=4)
    (why,) = said(gpu, reports(use=0.6, speed=50_000), looks=4)
    assert why == "the host needs 20 µs for a pair, the device 12"
    assert said(gpu, reports(use=0.8, speed=90_000, workers=2)) != []


def test_reports_may_come_less_often_than_looks() -> None:
    """With heartbeats every ten seconds, no GPU ever got a second worker."""
    seen = (report for report in reports(use=0.6, speed=50_000) for _ in range(2))
    assert said(SharedGpu(most=4), seen, looks=8)


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(reports(use=0.95, speed=50_000), id="the device is busy"),
        pytest.param(reports(use=0.6, speed=50_000, wait=0.2), id="there is too little work"),
        pytest.param(reports(use=0.6, speed=0), id="nothing is scored"),
        pytest.param(reports(use=0.6, speed=50_000, used=40 * GIB), id="a second one does not fit"),
        pytest.param(reports(use=0.6, speed=50_000, workers=4), id="there are enough"),
    ],
)
def test_no_worker_is_added_where_it_would_not_pay(
    seen: Iterator[Mapping[str, WorkerReport | None]],
) -> None:
    assert said(SharedGpu(most=4), seen) == []


def test_no_third_worker_follows_a_second_that_gained_nothing() -> None:
    gpu = SharedGpu(most=4)
    assert said(gpu, reports(use=0.6, speed=50_000), looks=4)
    assert said(gpu, reports(use=0.6, speed=51_000, workers=2)) == []
    assert said(gpu, reports(use=0.6, speed=90_000, workers=2)) == []


def test_no_other_follows_a_worker_that_was_given_up() -> None:
    gpu = SharedGpu(most=4)
    assert said(gpu, reports(use=0.6, speed=50_000), looks=4)
    assert said(gpu, reports(use=0.6, speed=50_000)) == []


def test_a_host_of_few_cores_keeps_one_worker_for_each_gpu() -> None:
    assert said(SharedGpu(most=1), reports(use=0.6, speed=50_000)) == []


@pytest.fixture
def shared(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerProcesses, list[str]]]:
    """Workers of a GPU to which one was added, none of which runs, and what was said.

    The reports are written by hand, as no device here is faster than its host; the workers are real.
    """
    monkeypatch.setattr("rankmill.producer.local.sharing.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("rankmill.producer.local.sharing.cores", lambda: 8)
    environ = {"CUDA_VISIBLE_DEVICES": "5", "RANKMILL_DEVICE": "cpu", "RANKMILL_METRICS_ADDRESS": "none"}
    lines: list[str] = []
    processes = WorkerProcesses(
        ["rankmill"],
        server.url,
        [environ],
        names=["first"],
        wait_seconds=5,
        on_given_up=lambda worker: lines.append(f"{worker.name} is given up"),
    )
    sharing, seen = GpuSharing(processes, server.url, lines.append), reports(use=0.5, speed=50_000)
    for _ in range(4):
        report = next(seen)["w0"]
        assert report
        announce_worker(server.client, "first", report, ttl=60)
        sharing.look()
    server.client.delete(keys.worker("first"))  # or the real worker waits until its name is free
    yield processes, lines
    processes.send(signal.SIGKILL)
    processes.wait()


def test_the_added_worker_starts_on_the_same_gpu(
    server: Server, shared: tuple[WorkerProcesses, list[str]]
) -> None:
    processes, lines = shared
    assert lines == ["2 workers share GPU 5: the host needs 20 µs for a pair, the device 10"]
    del processes.workers[0]
    assert [(worker.name, worker.gpu) for worker in processes.workers] == [("first-2", "5")]
    processes.restart_dead()
    wait_for(lambda: "first-2" in queue_workers(server.client, "rankmill").scoring)


@pytest.mark.parametrize("how", ["sys.exit(1)", "sys.exit(os.EX_CONFIG)", "os.kill(os.getpid(), 9)"])
def test_an_added_worker_that_dies_at_each_start_is_given_up(
    server: Server, shared: tuple[WorkerProcesses, list[str]], tmp_path: Path, how: str
) -> None:
    """The others go on; it ended the whole command."""
    processes, lines = shared
    first, added = processes.workers
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\n{how}\n")
    added.environ = {**added.environ, "PYTHONPATH": str(tmp_path), EXECUTED: "1"}

    def has_gone() -> bool:
        assert processes.restart_dead() is None
        return added not in processes.workers

    wait_for(has_gone)
    assert lines[1:] == ["first-2 is given up"]
    wait_for(lambda: "first" in queue_workers(server.client, "rankmill").scoring, first.process)
    assert processes.restart_dead() is None
    assert processes.workers == [first]
