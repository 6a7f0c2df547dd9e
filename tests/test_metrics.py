"""What a worker says of itself: its report, its metrics, its health."""

from __future__ import annotations

from pathlib import Path

from jobs.registry import STAGES, WorkerReport, queue_workers, worker_reports
from producer import Client
from tests.conftest import Server, StartWorker, wait_for

PAIRS: list[tuple[str, str | None]] = [("big cat", f"moon river {number}") for number in range(99)]
PAIRS.append(("big cat", None))


def the_report(server: Server) -> WorkerReport:
    (report,) = worker_reports(server.client, queue_workers(server.client, "rankmill").scoring).values()
    return report


def test_a_worker_reports_what_it_has_done(server: Server, workers: StartWorker, tiny_model: Path) -> None:
    workers()
    Client(server.url, model=str(tiny_model), chunk_size=10).score(PAIRS, timeout=60)
    wait_for(lambda: the_report(server).chunks == 10)
    report = the_report(server)
    assert (report.pairs, report.row_errors, report.retried_chunks) == (99, 1, 0)
    assert (report.claimed_jobs, report.claimed_pairs) == (0, 0)
    assert report.models == (str(tiny_model),)
    assert 0 < report.batches <= 99
    assert 99 < report.tokens <= report.padded_tokens
    assert sum(report.latency_counts) == 10
    assert all(seconds > 0 for seconds in report.stage_seconds)
    assert len(report.stage_seconds) == len(STAGES)
    assert report.started <= report.beat
    assert report.resident_bytes > 50_000_000
