"""Progress moves while chunks are scored, counts no row twice, and is true for a run that is resumed."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rq.job import Job

from rankmill import Client
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.run import Progress
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.sizing import WindowSize
from rankmill.score import progress as views
from rankmill.score.progress import progress_view
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.models.tiny import make_bert
from tests.harness.queue_by_hand import QueueByHand, pairs
from tests.harness.waiting import lose_waiting


@pytest.fixture
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 0)


@pytest.mark.usefixtures("_look_often")
def test_rows_of_a_chunk_that_is_given_up_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 0)
    queue = QueueByHand([pairs(10, 10 * chunk) for chunk in range(2)], WindowSize(4, 1 << 20))

    def work() -> None:
        if 0 in queue.waiting():
            queue.score(0)
        queue.store.write_scored_rows({queue.run.id: {10: 7}})
        if queue.driver.progress.rows == 17:
            lose_waiting(queue.store.redis, "q")
            queue.store.redis.unlink(Job.key_for(keys.job_id(queue.run.id, 10)))

    assert queue.scores(work)[10:] == [None] * 10
    assert queue.driver.progress.rows == 20


@pytest.mark.usefixtures("_look_often")
def test_rows_of_unfinished_chunks_count_once() -> None:
    queue = QueueByHand([pairs(10, 10 * chunk) for chunk in range(4)], WindowSize(4, 1 << 20))
    said: list[int] = []

    def scored(rows: dict[ChunkId, int]) -> None:
        queue.store.write_scored_rows({queue.run.id: rows})

    def steps() -> None:
        said.append(queue.driver.progress.rows)
        raw = queue.store.redis.get(keys.progress(queue.run.id)) or b""
        assert Progress.read_json(raw, "it").rows == said[-1]
        match len(said):
            case 1:
                scored({0: 5, 10: 3})
            case 2:
                scored({0: 2})  # its worker has died, and another has begun it again
            case 3:
                queue.score(0)
            case 4:
                scored({0: 9, 20: 99})  # a count that came late, and one that cannot be
            case 5:
                queue.score(20)
            case 6:
                queue.store.redis.hset(
                    keys.scored_rows(queue.run.id), mapping={"x": 1, "10": "many", "30": -1}
                )
            case _:
                for chunk in queue.waiting():
                    queue.score(chunk)

    assert queue.scores(steps) == list(range(40))
    assert said[:7] == [0, 8, 5, 13, 23, 23, 20]
    assert queue.driver.progress.rows == 40
    assert not queue.store.redis.keys("rankmill:run:*")
    scored({10: 1})  # by a worker that does not know of the end yet
    assert not queue.store.redis.keys("rankmill:run:*")


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


def test_the_speed_is_that_of_the_last_minute() -> None:
    now = 1000.0
    notes = RowCounter(known_rows=5000)
    notes.see(0, now)
    assert (notes.progress.rows, notes.progress.rows_per_second()) == (5000, None)
    now += 500  # the model is loaded
    for second in range(200):
        now += 1
        notes.see(10 * second if second < 100 else 1000 + 50 * (second - 100), now)
        if second == 50:
            assert notes.progress.rows_per_second() == pytest.approx(10)
            assert notes.progress.seconds_left(10_500) == pytest.approx(500)
    assert notes.progress.rows_per_second() == pytest.approx(50)
    assert notes.progress.seconds_left(None) is None


def test_a_log_has_no_time_left_that_is_not_known(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_LOG_SECONDS", 0)
    with caplog.at_level(logging.INFO), progress_view(200, quiet=True) as show:
        show(Progress(), 1, "loading the model")
        show(Progress(rows=100), 2, "")
        show(Progress(rows=150, since_rows=100, since=10.0, at=20.0), 2, "")
    assert [record.getMessage() for record in caplog.records] == [
        "0 of 200 rows (0%), loading the model, workers: 1",
        "100 of 200 rows (50%), ? pairs/s, time left: ?, workers: 2",
        "150 of 200 rows (75%), 5 pairs/s, time left: 0:00:10, workers: 2",
    ]


def test_a_terminal_shows_done_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        views, "Console", lambda stderr: Console(file=out, force_terminal=True, color_system=None)
    )
    with progress_view(200, quiet=False) as show:
        show(Progress(rows=150, since_rows=100, since=10.0, at=20.0), 2, "")
    assert "150/200 rows, 5 pairs/s, left 0:00:10 workers: 2" in out.getvalue()
    with progress_view(200, quiet=False) as show:
        show(Progress(), 1, "proving the model")
    assert "0/200 rows, proving the model workers: 1" in out.getvalue()


def test_progress_moves_before_the_first_chunk_is_done(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make_bert(tmp_path / "slow", hidden=256, layers=6)
    run = Client(server.url, model=str(model), chunk_size=5000).submit([("big cat", "the moon " * 40)] * 5000)
    workers()

    def under_way() -> bool:
        (seen,) = read_cluster(server.client).runs
        return 0 < seen.rows_done == run.progress.rows < 5000 and seen.seconds_left is not None

    parts = run.tables()
    run._drivers[0].on_wait = lambda: _stop_if(under_way())
    with pytest.raises(KeyboardInterrupt):
        wait_for(lambda: next(parts))
    assert server.client.hlen(keys.scored_rows(run.id)) == 1
    assert 0 < server.client.ttl(keys.scored_rows(run.id)) <= 60
    run.cancel()
    assert not list(server.client.scan_iter("rankmill:run:*"))


def _stop_if(true: bool) -> None:
    if true:
        raise KeyboardInterrupt
