"""What becomes of chunks, without a server, a disk or a clock; and one count of a chunk's attempts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rq.job import Job
from rq.serializers import JSONSerializer

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunCancelled, WrongScores
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.contract.results import (
    BadResult,
    ChunkFailure,
    ChunkResult,
    ChunkScores,
)
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.accounts import read_accounts
from rankmill.jobs.protocol.recovery import failure_handler
from rankmill.producer.collect.collector import Collector, HowScored, Piece
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.scored import join_results
from rankmill.producer.collect.sizing import WindowSize
from tests.harness.queue_by_hand import STATS, QueueByHand, pairs
from tests.harness.waiting import lose_waiting, waiting_jobs

BROKEN: dict[Any, Any] = {"scores": b"?", "stats": "{}"}

RETRIES = 2


@settings(max_examples=200)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(), st.sampled_from([0, 0.3, 0.9]))
def test_every_row_is_finished_once_and_in_order(rows: list[int], random: Random, trouble: float) -> None:
    run = new_run(ScoreSpec(model="m"), queue="q", ttl=60, max_retries=RETRIES)
    collector = Collector(run, WindowSize(3, 1 << 20), RowCounter(0))
    tables = iter([pairs(count, sum(rows[:at])) for at, count in enumerate(rows)])
    failed: dict[ChunkId, int] = {}
    tries: dict[ChunkId, int] = {}
    sent: list[Piece] = []
    found: dict[int, list[float | None]] = {}
    counted: dict[int, int | None] = {}
    told: dict[int, int | None] = {}
    given_up: list[ChunkFailure] = []
    scores: list[float | None] = []
    now = 0.0

    def send(fresh: list[Piece]) -> None:
        if fresh:
            collector.sent({piece.id: 100 for piece in fresh})
        sent.extend(fresh)
        for piece in fresh:
            tries[piece.id] = tries.get(piece.id, 0) + 1

    def answer(piece: Piece) -> ChunkResult | BadResult:
        if random.random() >= trouble:
            numbers = pa.array([float(query.as_py()) for query in piece.table["query"]], pa.float32())
            if random.random() < 0.5:  # nobody asked for tokens
                return ChunkScores(piece.id, numbers, pa.nulls(len(numbers), pa.string()), STATS)
            tokens = pc.add(numbers, 100).cast(pa.int32())
            told.update((int(number), int(number) + 100) for number in numbers.to_pylist())
            return ChunkScores(piece.id, numbers, pa.nulls(len(numbers), pa.string()), STATS, tokens)
        if random.random() < 0.5:
            return ChunkFailure(chunk=piece.id, message="bad", fatal=False, died=True)
        return BadResult(piece.id, "it is damaged")

    while not collector.done:
        now += 1
        while collector.has_room and not collector.exhausted:
            if (table := next(tables, None)) is None:
                collector.exhausted = True
            elif piece := collector.add(table):
                send([piece])
        reasons: dict[ChunkId, str] = {}
        if sent:
            piece = sent.pop(random.randrange(len(sent)))
            if random.random() < trouble / 3:
                reasons = {piece.id: "it was lost"}
            else:
                result = answer(piece)
                collector.how.settled = collector.news([result]) or collector.how.settled
                accepted = collector.accept([result], now)
                reasons = accepted.jobless
        again, lost = collector.retry(reasons, failed)
        failed |= {piece.id: piece.failed for piece in again}
        send(again)
        given_up += lost
        collector.accept(lost, now)
        for chunk in collector.pop_finished():
            found[chunk.number] = chunk.part.scores.to_pylist()
            part = chunk.part
            tokens = [None] * len(part.table) if part.tokens is None else part.tokens.to_pylist()
            counted |= dict(enumerate(tokens, chunk.number))
        while collector.ready:
            scores += found.pop(collector.take())
    assert len(scores) == sum(rows)
    assert all(score in (None, row) for row, score in enumerate(scores))
    assert trouble or None not in scores
    assert counted == {row: told.get(row) for row in range(sum(rows))}
    assert all(count <= RETRIES + 1 for count in tries.values())
    assert {tries[failure.chunk] for failure in given_up} <= {RETRIES + 1}
    assert (collector.rows.progress.rows, collector.pieces) == (sum(rows), {})


@pytest.mark.parametrize("inputs", ["texts", "tokens"])
def test_tokens_are_alike_in_all_precisions(inputs: Inputs) -> None:
    how = HowScored(ScoreSpec(model="m", inputs=inputs), STATS)
    objection = how.objection(STATS.model_copy(update={"precision": "bf16"}))
    assert objection == (None if inputs == "tokens" else "it is in bf16, and the run in fp32")


@pytest.mark.parametrize("second", ["unusable", "lost"])
def test_attempts_are_counted_whatever_ends_them(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker fails, and then the result is unusable or the job lost: these are both of two attempts."""
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 0)
    queue = QueueByHand([pairs(3)], WindowSize(4, 1 << 20))
    job_id = keys.job_id(queue.run.id, 0)

    def work() -> None:
        redis = queue.store.redis
        if redis.exists(Job.key_for(job_id)):
            job = Job.fetch(job_id, redis, serializer=JSONSerializer)
            failure_handler(queue.store)(job, ValueError, ValueError("bad"), None)
            redis.delete(Job.key_for(job_id))
            lose_waiting(redis, "q")
            if second == "unusable":
                redis.xadd(keys.results(queue.run.id), {"run": queue.run.id, "chunk": 0, **BROKEN})

    queue.driver.on_wait = work
    queue.driver.fill()
    (part,) = queue.driver.tables()
    reason = "its result cannot be used: " if second == "unusable" else "it was lost"
    assert str(part.errors[0]).startswith(f"given up after attempt 2: {reason}")
    assert part.attempts == 2


def test_a_chunk_has_as_many_attempts_as_its_piece_that_failed() -> None:
    stats = STATS.model_copy(update={"windows": 2})
    scored = ChunkScores(0, pa.array([1.0], pa.float32()), pa.nulls(1, pa.string()), stats)
    failed = ChunkFailure(chunk=1, message="given up", fatal=False, attempts=3)
    whole = join_results(0, [(1, scored), (1, failed), (1, scored)])
    assert isinstance(whole, ChunkScores)
    assert (whole.stats.attempt, whole.stats.windows) == (3, 4)


@pytest.mark.parametrize("priority", ["bulk", "request"])
def test_a_run_with_wrong_scores_does_not_end_well(priority: Priority) -> None:
    """Shows: a device computes wrong scores."""
    queue = QueueByHand([pairs(3)], WindowSize(4, 1 << 20), priority=priority)
    queue.driver.on_wait = queue.score_all
    tables = queue.driver.tables()
    next(tables)
    queue.store.leave_notes({queue.run.id: 60}, "worker w scores wrongly")
    with pytest.raises(
        WrongScores, match=r"scores of run .+ are wrong: worker w scores wrongly; score it again"
    ):
        next(tables)
    assert queue.store.load(queue.run.id) is None


def test_a_run_ends_at_once_when_its_scores_are_found_wrong() -> None:
    queue = QueueByHand([pairs(3), pairs(3, 3)], WindowSize(1, 1 << 20))
    tables = queue.driver.tables()
    queue.driver.on_wait = lambda: queue.store.leave_notes({queue.run.id: 60}, "worker w scores wrongly")
    with pytest.raises(WrongScores):  # though no worker answers any more
        next(tables)
    assert not waiting_jobs(queue.store.redis, "q")


def test_a_run_that_continues_a_file_looks_at_the_runs_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin("before")
    queue = QueueByHand([pairs(3), pairs(3, 3)], WindowSize(1, 1 << 20), journal)
    queue.driver.on_wait = queue.score_all
    tables = queue.driver.tables()
    next(tables)
    queue.store.leave_notes({"before": 60}, "worker w scores wrongly")
    with pytest.raises(WrongScores, match=r"scores of this output are wrong: .+; start over with --restart"):
        list(tables)
    assert journal.wrong
    journal.restart({})
    assert not journal.wrong


def test_a_run_with_wrong_scores_that_is_cancelled_stays_cancelled() -> None:
    queue = QueueByHand([pairs(3), pairs(3, 3)], WindowSize(1, 1 << 20))
    queue.driver.on_wait = queue.score_all
    tables = queue.driver.tables()
    next(tables)
    queue.store.leave_notes({queue.run.id: 60}, "worker w scores wrongly")
    queue.store.cancel(queue.run)
    with pytest.raises(RunCancelled):
        next(tables)


def test_what_a_run_has_when_it_is_cancelled_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is still in Redis.

    Shows: a run is cancelled.
    """
    queue = QueueByHand([pairs(3), pairs(3, 3)], WindowSize(1, 1 << 20))
    monkeypatch.setattr(queue.store, "forget", lambda *_: queue.driver.cancel())  # as another thread may
    with suppress(RunCancelled):
        queue.scores(queue.score_all)
    assert sum(each.amounts.pairs for each in read_accounts(queue.store.redis, 2)) == 3
    assert not queue.store.redis.keys("rankmill:run:*")


def test_a_run_that_is_cancelled_while_chunks_are_sent_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = QueueByHand([pairs(3), pairs(3, 3)], WindowSize(1, 1 << 20))
    enqueue = queue.store.enqueue

    def after_a_cancellation(*args: Any, **options: Any) -> None:
        queue.driver.cancel()  # as another thread may
        enqueue(*args, **options)

    monkeypatch.setattr(queue.store, "enqueue", after_a_cancellation)
    with pytest.raises(RunCancelled):
        queue.scores(queue.score_all)
    assert not waiting_jobs(queue.store.redis, "q")
    assert not queue.store.redis.keys("rankmill:run:*")
    assert not queue.store.redis.keys("rq:job:*")


def test_what_is_in_a_journal_is_counted_though_a_signal_comes_just_then(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    journal = Journal(tmp_path / "journal.db", interrupted)  # called after each write of results
    queue = QueueByHand([pairs(3), pairs(3, 3)], WindowSize(1, 1 << 20), journal)
    with pytest.raises(KeyboardInterrupt):
        queue.scores(queue.score_all)
    queue.driver.cancel()
    assert sum(each.amounts.pairs for each in read_accounts(queue.store.redis, 2)) == journal.rows == 3
    assert not queue.store.redis.keys("rankmill:run:*")
