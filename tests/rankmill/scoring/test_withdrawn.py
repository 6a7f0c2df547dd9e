"""A worker takes back scores of a file at the worst moments: its output has none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunCancelled
from rankmill.jobs.contract.results import ChunkScores, Withdrawal
from rankmill.jobs.contract.wire import decode_pairs
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.submitted.request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.journal import Journal
from rankmill.score.score_file import score_file
from tests.conftest import Server
from tests.harness.queue_by_hand import STATS


class Device:
    """Scores a queue's chunks by hand: the score of a row is its query, and 1000 more while it is broken."""

    def __init__(self, store: RunStore, queue: str) -> None:
        self.store, self.queue, self.broken = store, queue, False
        self.wrong: list[tuple[str, int]] = []
        """Runs and chunks that it has scored when it was broken."""

    def work(self, at_most: int = 1000) -> None:
        """Score what waits."""
        for name in self.store.redis.lrange(f"rq:queue:{self.queue}", 0, at_most - 1):
            run_id, chunk = keys.parse_job_id(name.decode()) or ("", 0)
            if run := self.store.load(run_id):
                queries, _ = decode_pairs(self.store.payload(run, chunk) or b"")
                scores = pa.array([float(query or 0) + 1000 * self.broken for query in queries], pa.float32())
                self.wrong += [(run_id, chunk)] * self.broken
                self.store.write_result(
                    run, ChunkScores(chunk, scores, pa.nulls(len(scores), pa.string()), STATS)
                )
            self.store.redis.lrem(f"rq:queue:{self.queue}", 1, name)
            self.store.redis.unlink(Job.key_for(name.decode()))

    def withdraw(self, at_most: int = 1000) -> None:
        """Take wrong scores back, those of each chunk on its own."""
        for run_id, chunk in self.wrong[:at_most]:
            self.store.withdraw(run_id, Withdrawal(chunks=(chunk,), worker="w", reason="differs"), 60)
        del self.wrong[:at_most]


Score = Callable[[Callable[[int], None]], list[float]]
"""Scores the file, and calls a function with the rows done while it waits; returns its scores."""


@pytest.fixture
def device(shared_server: Server) -> Device:
    return Device(RunStore(shared_server.client), f"by-hand-{system.unique_id()}")


@pytest.fixture
def score(shared_server: Server, device: Device, tiny_model: Path, tmp_path: Path) -> Score:
    queries = [*range(8), *range(4)]  # the last chunk has the pairs of the first
    table = pa.table({"query": list(map(str, queries)), "passage": ["p"] * len(queries)})
    pq.write_table(table, tmp_path / "in.parquet")
    flags = {"redis_url": shared_server.url, "queue": device.queue, "model": str(tiny_model)}
    settings = load_settings({**flags, "precision": "fp32", "chunk_size": 4})
    request = FileRequest(inputs=(str(tmp_path / "in.parquet"),), output=str(tmp_path / "out.parquet"))

    def scored(look: Callable[[int], None]) -> list[float]:
        @contextmanager
        def view(rows: int) -> Iterator[Any]:
            yield lambda progress, *_: look(progress.rows)

        score_file(request, settings, view=view)
        return pq.read_table(tmp_path / "out.parquet")["score"].to_pylist()  # type: ignore[no-any-return]

    return scored


RIGHT = [*range(8), *range(4)]


def killed_when_scored(score: Score, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score the file with a broken device, and die when all is in the journal, but the run still in Redis."""
    device.broken = True

    def look(rows: int) -> None:
        device.work()
        if rows == len(RIGHT):
            raise KeyboardInterrupt

    with monkeypatch.context() as dies:
        dies.setattr(RunCleaner, "remove", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            score(look)
    device.broken = False


def test_another_process_cancels_the_run_before_its_collector_has_heard_of_them(
    score: Score, device: Device
) -> None:
    device.broken = True

    def look(rows: int) -> None:
        if not rows:
            device.work(1)
        elif device.wrong and (run := device.store.load(device.wrong[0][0])):
            device.withdraw()
            device.store.cancel(run)

    with pytest.raises(RunCancelled):
        score(look)
    device.broken = False
    assert score(lambda _: device.work()) == RIGHT


@pytest.mark.parametrize("killed", [False, True])
def test_some_more_are_withdrawn_while_the_first_leave_the_journal(
    killed: bool, score: Score, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Journal.withdraw

    def and_more(journal: Journal, rows: Any) -> None:
        remove(journal, rows)
        device.withdraw()

    monkeypatch.setattr(Journal, "withdraw", and_more)
    if killed:
        killed_when_scored(score, device, monkeypatch)
        device.withdraw(1)
    device.broken = not killed

    def look(rows: int) -> None:
        if rows and device.broken:
            device.broken = False
            device.withdraw(1)
        elif not device.wrong:
            device.work()

    assert score(look) == RIGHT
    assert not device.wrong


def test_copies_that_a_run_before_has_made_are_taken_back(
    score: Score, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_when_scored(score, device, monkeypatch)
    assert [chunk for _, chunk in device.wrong] == [0, 4]
    device.withdraw()
    assert score(lambda _: device.work()) == RIGHT


def test_what_cannot_be_read_takes_back_all(
    score: Score, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_when_scored(score, device, monkeypatch)
    device.store.redis.xadd(keys.withdrawals(device.wrong[0][0]), {"withdrawal": "{"})
    assert score(lambda _: device.work()) == RIGHT
