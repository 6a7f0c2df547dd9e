"""What becomes of chunks, without a server, a disk or a clock; and one count of a chunk's attempts."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rq.job import Job
from rq.serializers import JSONSerializer

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.results import (
    BadResult,
    ChunkFailure,
    ChunkResult,
    ChunkScores,
    Withdrawal,
    from_entry,
    read_entry,
    to_entry,
)
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.recovery import failure_handler
from rankmill.producer.collect.collector import Collector, Piece
from rankmill.producer.collect.earlier import no_earlier
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.progress import RowCounter
from rankmill.producer.collect.sizing import WindowSize
from tests.harness.queue_by_hand import STATS, QueueByHand, pairs

RETRIES = 2


@settings(max_examples=200)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(), st.sampled_from([0, 0.3, 0.9]))
def test_every_row_is_finished_once_and_in_order(rows: list[int], random: Random, trouble: float) -> None:
    run = new_run(ScoreSpec(model="m"), queue="q", ttl=60, max_retries=RETRIES)
    collector = Collector(run, WindowSize(3, 1 << 20), RowCounter(0))
    tables = iter([pairs(count, sum(rows[:at])) for at, count in enumerate(rows)])
    failed: dict[int, int] = {}
    tries: dict[int, int] = {}
    sent: list[Piece] = []
    found: dict[int, list[float | None]] = {}
    counted: dict[int, int | None] = {}
    told: dict[int, int | None] = {}
    given_up: list[ChunkFailure] = []
    scores: list[float | None] = []
    now = 0.0

    def send(fresh: list[Piece]) -> None:
        if fresh:
            collector.sent({piece.number: 100 for piece in fresh})
        sent.extend(fresh)
        for piece in fresh:
            tries[piece.number] = tries.get(piece.number, 0) + 1

    def answer(piece: Piece) -> ChunkResult | BadResult:
        if random.random() >= trouble:
            numbers = pa.array([float(query.as_py()) for query in piece.table["query"]], pa.float32())
            if random.random() < 0.5:  # a worker of the release before
                return ChunkScores(piece.number, numbers, pa.nulls(len(numbers), pa.string()), STATS)
            tokens = pc.add(numbers, 100).cast(pa.int32())
            told.update((int(number), int(number) + 100) for number in numbers.to_pylist())
            return ChunkScores(piece.number, numbers, pa.nulls(len(numbers), pa.string()), STATS, tokens)
        if random.random() < 0.5:
            return ChunkFailure(chunk=piece.number, message="bad", fatal=False, died=True)
        return BadResult(piece.number, "it is damaged")

    while not collector.done:
        now += 1
        while collector.has_room and not collector.exhausted:
            if (table := next(tables, None)) is None:
                collector.exhausted = True
            elif piece := collector.add(table):
                send([piece])
        reasons: dict[int, str] = {}
        if sent:
            piece = sent.pop(random.randrange(len(sent)))
            if random.random() < trouble / 3:
                reasons = {piece.number: "it was lost"}
            else:
                result = answer(piece)
                collector.how.settled = collector.news([result]) or collector.how.settled
                accepted = collector.accept([result], now)
                reasons = {**accepted.unusable, **{half.number: "" for half in accepted.halves}}
        again, lost = collector.retry(reasons, failed)
        failed |= {piece.number: piece.failed for piece in again}
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
            redis.delete(Job.key_for(job_id), "rq:queue:q")
            if second == "unusable":
                redis.xadd(keys.results(queue.run.id), {"chunk": 0, "scores": b"?", "stats": "{}"})

    queue.driver.on_wait = work
    queue.driver.fill()
    (part,) = queue.driver.tables()
    reason = "its result cannot be used: " if second == "unusable" else "it was lost"
    assert str(part.errors[0]).startswith(f"given up after attempt 2: {reason}")
    assert part.attempts == 2


def test_what_is_withdrawn_takes_its_copies_with_it(tmp_path: Path) -> None:
    run = new_run(ScoreSpec(model="m"), queue="q", ttl=60, max_retries=RETRIES)
    columns = ("query", "passage")
    collector = Collector(run, WindowSize(9, 1 << 20), RowCounter(0), reuse=no_earlier(columns))
    tables = [pairs(4, 0), pairs(4, 4), pa.concat_tables([pairs(2, 0), pairs(2, 20)]), pairs(4, 30)]
    pieces = [piece for table in tables if (piece := collector.add(table))]

    def scored(piece: Piece) -> ChunkScores:
        scores = pa.array([1.0] * len(piece.table), pa.float32())
        return ChunkScores(piece.number, scores, pa.nulls(len(scores), pa.string()), STATS)

    def withdraw(*numbers: int) -> None:
        told = Withdrawal(chunks=numbers, worker="w", reason="differs")
        collector.accept([read_entry({b"withdrawal": str(to_entry(told)["withdrawal"]).encode()})], 1.0)

    results = [scored(piece) for piece in pieces[:3]]
    collector.how.settled = collector.news(results) or collector.how.settled
    collector.accept(results, 1.0)
    withdraw(pieces[3].number)
    assert not collector.withdrawn  # it has no score yet
    withdraw(0)
    assert collector.withdrawn == {0, 8}
    journal = Journal(tmp_path / "journal")
    journal.add(
        {
            each.number: (len(each.part.table), each.result)
            for each in collector.pop_finished()
            if each.result
        },
        {},
    )
    journal.withdraw([*collector.withdrawn, 30])
    assert [journal.get(number) is not None for number in (0, 4, 8)] == [False, True, False]


def test_a_release_before_takes_a_withdrawal_for_a_result_that_it_cannot_use() -> None:
    entry = to_entry(Withdrawal(chunks=(0,), worker="w", reason="differs"))
    with pytest.raises(WireError, match="does not name its chunk"):
        from_entry({name.encode(): str(value).encode() for name, value in entry.items()})
