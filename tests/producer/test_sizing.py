"""Chunks of about a second's work of the slowest worker, cut where the journal was cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.contract.results import ChunkFailure
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.queues import QueueCapacity
from rankmill.jobs.system import system
from rankmill.producer.collect.journal import Account, Journal
from rankmill.producer.collect.sizing import MAX_ROWS, MIN_ROWS, Load, Sizing, WindowSize
from tests.conftest import Server


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(system, "monotonic", lambda: self.now)


def sizing(model: str, learnt: dict[str, int] | None = None) -> Sizing:
    found = Sizing("auto", learnt)
    found.add(new_run(ScoreSpec(model=model), queue="q", ttl=60, max_retries=1, priority="bulk"))
    return found


def test_chunks_follow_the_slowest_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is a second's work of its device, by what it says with its last result."""
    clock = Clock(monkeypatch)
    learnt: dict[str, int] = {}
    size = sizing("m", learnt)
    assert not size.is_known
    assert size.rows_at(0) == MIN_ROWS
    size.see("m", "fast", 16, 0.0016)
    assert size.is_known
    assert size.rows_at(0) == 8 * MIN_ROWS  # its device could score 10,000
    size.see("m", "slow", 50, 0.5)
    size.see("m", "fast", 128, 0.0128)
    assert size.rows_at(0) == 100
    size.see("m", "slow", 16, 0.0)  # says nothing
    assert size.rows_at(0) == 100
    clock.now += 31  # no more results of the slow worker
    for rows in (100, 800, 6400):
        size.see("m", "fast", rows, rows / 10_000)
    assert size.rows_at(0) == 10_000
    size.see("m", "fast", 10_000, 0.01)
    assert size.rows_at(0) == MAX_ROWS
    assert sizing("m", learnt).rows_at(0) == MAX_ROWS  # the client's next run begins with it
    assert sizing("another", learnt).rows_at(0) == MIN_ROWS
    fixed = Sizing(7)
    fixed.see("m", "w", 7, 1.0)
    assert fixed.rows_at(0) == 7


def test_few_small_chunks_are_cut_before_the_speed_is_known() -> None:
    def fits(window: WindowSize) -> int:
        return next(pieces for pieces in range(20_000) if window.is_full(Load(pieces, 16 * pieces)))

    window, capacity = WindowSize("auto", 1 << 30), QueueCapacity(workers=100, claim_ahead=100_000)
    window.follow(QueueCapacity(), 0, sized=False)
    assert fits(window) == 8
    window.follow(capacity, 0, sized=False)
    assert fits(window) == 200
    window.follow(capacity, 16, sized=True)
    assert fits(window) == 2 * (100_000 + 100 * 16) // 16


def test_a_chunk_ends_where_the_journal_has_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.begin("run")
    failures = {start: ChunkFailure(chunk=start, message="no", fatal=False) for start in (10, 100)}
    journal.add({start: (20, failure) for start, failure in failures.items()}, Account())
    size = Sizing(64, journals=[journal])
    assert [size.rows_at(start) for start in (0, 5, 10, 30, 94, 100, 120)] == [10, 5, 20, 64, 6, 20, 64]
    journal.close()


def test_several_models_share_chunks_and_no_chunk_crosses_a_part(tmp_path: Path) -> None:
    """The slower model decides, and both journals' chunks are cut as they were."""
    learnt = {"quick": 500, "slow": 50}
    journals = [Journal(tmp_path / f"{number}.db") for number in range(2)]
    for journal, start in zip(journals, (100, 140), strict=True):
        journal.begin("run")
        failure = ChunkFailure(chunk=start, message="no", fatal=False)
        journal.add({start: (20, failure)}, Account())
    size = Sizing("auto", learnt, journals, part_rows=210)
    for model in learnt:
        size.add(new_run(ScoreSpec(model=model), queue="q", ttl=60, max_retries=1, priority="bulk"))
    assert [size.rows_at(start) for start in (0, 60, 100, 120, 140, 160, 200, 210)] == [
        50, 40, 20, 20, 20, 50, 10, 50
    ]  # fmt: skip
    size.see("quick", "w", 16, 0.64)
    assert size.rows_at(210) == 25
    for journal in journals:
        journal.close()


def test_the_size_of_chunks_grows_with_the_speed(shared_queue: Server, tiny_model: Path) -> None:
    client = Client(shared_queue.url, model=str(tiny_model), precision="fp32")
    pairs = [("big cat", f"moon river {number % 7}") for number in range(6000)]
    run = client.submit(pairs)
    parts = list(run.tables())
    sizes = [len(part.table) for part in parts]
    assert sum(sizes) == 6000
    assert sizes[0] == MIN_ROWS < max(sizes)
    scores = np.concatenate([part.scores.to_numpy() for part in parts])
    assert all(np.allclose(scores[row::7], scores[row], atol=1e-4) for row in range(7))
