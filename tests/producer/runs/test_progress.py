"""Progress moves while chunks are scored, counts no row twice, and is true for a run that is resumed."""

from __future__ import annotations

import io
import logging
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract.run import Progress
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import WindowSize
from rankmill.score import progress as views
from rankmill.score.progress import progress_view
from tests.harness.queue_by_hand import QueueByHand, pairs


@pytest.fixture
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 0)


@pytest.mark.usefixtures("_look_often")
def test_a_resumed_run_shows_its_share_from_the_start(tmp_path: Path) -> None:
    tables = [pairs(10, 10 * chunk) for chunk in range(8)]
    journal = Journal(tmp_path / "journal.db")
    first = QueueByHand(tables, WindowSize(2, 1 << 20), journal)
    first.driver.begin()

    def five_chunks_and_an_end() -> None:
        first.score(first.waiting()[-1])
        if journal.rows >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.scores(five_chunks_and_an_end)
    known = journal.rows
    assert 50 <= known < 80
    again = QueueByHand(tables, WindowSize(2, 1 << 20), journal)
    again.driver.begin()
    (run,) = read_cluster(again.store.redis).runs
    assert (run.rows_done, run.rows_per_second) == (known, None)
    said: list[int] = []

    def one_by_one() -> None:
        said.append(again.driver.progress.rows)
        again.score(again.waiting()[0])

    assert again.scores(one_by_one) == list(range(80))
    assert said == list(range(known, 80, 10))
    journal.close()


def scored(rows: int) -> ScoredTable:
    nothing = pa.nulls(rows, pa.string())
    return ScoredTable(pa.table({"n": range(rows)}), pa.nulls(rows), nothing, None, 1, "")


def test_the_speed_is_that_of_the_last_minute() -> None:
    now = 1000.0
    notes = RowCounter(known_rows=5000)
    notes.see(now)
    assert (notes.progress.rows, notes.progress.rows_per_second(now)) == (5000, None)
    now += 500  # the model is loaded
    for second in range(200):
        now += 1
        notes.add(0, scored(10 if second < 100 else 50))
        notes.see(now)
        if second == 50:
            assert notes.progress.rows_per_second(now) == pytest.approx(10)
            assert notes.progress.seconds_left(10_510, now) == pytest.approx(500)
    assert notes.progress.rows_per_second(now) == pytest.approx(50)
    assert notes.progress.seconds_left(None, now) is None


def test_a_log_has_no_time_left_that_is_not_known(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(views, "_LOG_SECONDS", 0)
    with caplog.at_level(logging.INFO), progress_view(200, quiet=True) as show:
        show(Progress(), 1, "loading the model")
        show(Progress(rows=100), 2, "")
        show(Progress(rows=150, since_rows=100, since=now - 10, at=now), 2, "")
    assert [each.getMessage() for each in caplog.records if each.name == views.logger.name] == [
        "0 of 200 pairs, loading the model, workers: 1",
        "100 of 200 pairs, workers: 2",
        "150 of 200 pairs, 5 pairs/s, 0:00:10 left, workers: 2",
    ]


def test_a_terminal_shows_done_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = time.time(), io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        views, "Console", lambda stderr: Console(file=out, force_terminal=True, color_system=None)
    )
    with progress_view(200, quiet=False) as show:
        show(Progress(rows=150, since_rows=100, since=now - 10, at=now), 2, "")
    assert "150 of 200 pairs, 5 pairs/s, 0:00:10 left, workers: 2" in out.getvalue()
    with progress_view(200, quiet=False) as show:
        show(Progress(), 1, "proving the model")
    assert "0 of 200 pairs, proving the model, workers: 1" in out.getvalue()
