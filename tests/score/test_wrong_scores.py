"""A worker finds its scores of a file wrong at the worst moments: no output has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunCancelled, WrongScores
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.results import ChunkScores
from rankmill.jobs.contract.wire import decode_rows
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.score.score_file import score_file
from tests.conftest import Server
from tests.harness.queue_by_hand import STATS
from tests.harness.waiting import take_out, waiting_jobs


class Device:
    """Scores a queue's chunks by hand: the score of a row is its query, and 1000 more while it is broken."""

    def __init__(self, store: RunStore, queue: str) -> None:
        self.store, self.queue, self.broken = store, queue, False
        self.wrong: list[str] = []
        """Runs that it has answered when it was broken."""

    def work(self, at_most: int = 1000) -> None:
        """Score what waits."""
        for name in waiting_jobs(self.store.redis, self.queue)[:at_most]:
            run_id, chunk = keys.parse_job_id(name) or ("", 0)
            if run := self.store.load(run_id):
                queries, _ = decode_rows(self.store.payload(run, chunk) or b"", "pairs")
                scores = pa.array([float(query or 0) + 1000 * self.broken for query in queries], pa.float32())
                self.wrong += [run_id] * self.broken
                self.store.write_result(
                    run, ChunkScores(chunk, scores, pa.nulls(len(scores), pa.string()), STATS)
                )
            take_out(self.store.redis, name, self.queue)
            self.store.redis.unlink(Job.key_for(name))

    def stop(self) -> None:
        """Leave a note with the runs that have wrong scores."""
        self.store.leave_notes(dict.fromkeys(self.wrong, 60), "worker w scores wrongly")


Look = Callable[[int], None]


class Score(Protocol):
    """Scores the file, and calls a function with the rows done while it waits; returns its scores."""

    def __call__(self, look: Look, *, restart: bool = False) -> list[float]: ...


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

    def scored(look: Look, *, restart: bool = False) -> list[float]:
        @contextmanager
        def view(rows: int) -> Iterator[Any]:
            yield lambda progress, *_: look(progress.rows)

        score_file(request.model_copy(update={"restart": restart}), settings, view=view)
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


def is_refused_until_it_starts_over(score: Score, device: Device) -> None:
    """The same command ends with the sentence, however often it is given, also when the server forgets."""
    device.broken = False
    for _ in range(2):
        with pytest.raises(WrongScores, match="worker w scores wrongly; start over with --restart"):
            score(lambda _: device.work())
        device.store.redis.unlink(*map(keys.wrong, device.wrong))
    assert score(lambda _: device.work(), restart=True) == RIGHT


def test_a_run_is_cancelled_before_its_producer_reads_the_note(score: Score, device: Device) -> None:
    device.broken = True

    def look(rows: int) -> None:
        if not rows:
            device.work(1)
        elif device.wrong and (run := device.store.load(device.wrong[0])):
            device.stop()
            device.store.cancel(run)

    with pytest.raises(RunCancelled):
        score(look)
    is_refused_until_it_starts_over(score, device)


def test_a_note_comes_when_nobody_waits(
    score: Score, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_when_scored(score, device, monkeypatch)
    device.stop()
    is_refused_until_it_starts_over(score, device)


def test_a_note_comes_with_the_last_rows(score: Score, device: Device) -> None:
    device.broken = True

    def look(rows: int) -> None:
        device.work()
        if rows == len(RIGHT):
            device.stop()

    with pytest.raises(WrongScores) as ended:
        score(look)
    assert not getattr(ended.value, "__notes__", None)  # that the same command continues
    is_refused_until_it_starts_over(score, device)
