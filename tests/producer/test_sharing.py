"""Further workers for a GPU that waits for its host, by the reports that workers write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

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
    (why, *_) = said(gpu, reports(use=0.6, speed=50_000))
    assert why == "the host needs 20 µs for a pair, the device 12"
    assert said(gpu, reports(use=0.8, speed=90_000, workers=2)) != []


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


def test_a_host_of_few_cores_keeps_one_worker_for_each_gpu() -> None:
    assert said(SharedGpu(most=1), reports(use=0.6, speed=50_000)) == []


def test_the_added_worker_starts_on_the_same_gpu(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are written by hand, as no device here is faster than its host; the worker is real."""
    monkeypatch.setattr("rankmill.producer.local.sharing.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("rankmill.producer.local.sharing.cores", lambda: 8)
    environ = {"CUDA_VISIBLE_DEVICES": "5", "RANKMILL_DEVICE": "cpu", "RANKMILL_METRICS_ADDRESS": "none"}
    processes = WorkerProcesses(["rankmill"], server.url, [environ], names=["first"], wait_seconds=5)
    lines: list[str] = []
    sharing, seen = GpuSharing(processes, server.url, lines.append), reports(use=0.5, speed=50_000)
    for _ in range(4):
        report = next(seen)["w0"]
        assert report
        announce_worker(server.client, "first", report, ttl=60)
        sharing.look()
    assert lines == ["2 workers share GPU 5: the host needs 20 µs for a pair, the device 10"]
    added = processes.workers[1:]
    assert [(worker.name, worker.gpu) for worker in added] == [("first-2", "5")]
    processes.workers = added
    try:
        processes.restart_dead()
        wait_for(lambda: "first-2" in queue_workers(server.client, "rankmill").scoring)
    finally:
        for worker in added:
            if worker.process:
                worker.process.kill()
        processes.wait()
