"""A late chunk keeps no other from being scored; what waits for it is in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import fakeredis
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rq.job import Job

from jobs import keys
from jobs.results import ChunkScores, ChunkStats
from jobs.spec import ScoreSpec
from jobs.store.capacity import Capacity
from jobs.store.runs import RunStore
from jobs.wire import decode_pairs
from producer.leftovers import Leftovers
from producer.sizing import WindowSize
from producer.splitting import ScoredTable
from producer.spool import Spool
from producer.submission import Submission
from tests.conftest import Server, StartWorker, wait_for

STATS = ChunkStats(
    worker="w", device="cpu", backend="torch", precision="fp32", revision="commit",
    attempt=1, tokens=10, padded_tokens=12, batches=1, seconds=0.5,
)  # fmt: skip


class Queue:
    """Workers by hand: the jobs of a run on a server of its own, and their results when a test says so."""

    def __init__(self, tables: list[pa.Table], size: WindowSize) -> None:
        self.store = RunStore(fakeredis.FakeRedis())
        self.run = self.store.create(ScoreSpec(model="m"), queue="q", ttl=100, max_retries=1)
        columns = ("query", "passage")
        self.submission = Submission(self.store, self.run, Leftovers(self.store), iter(tables), columns, size)
        self.most_waiting = 0

    def waiting(self) -> list[int]:
        """Chunks that no worker has scored, in the order of the queue."""
        names = self.store.redis.lrange("rq:queue:q", 0, -1)
        chunks = [parsed[1] for name in names if (parsed := keys.parse_job_id(name.decode()))]
        self.most_waiting = max(self.most_waiting, len(chunks))
        return chunks

    def score(self, chunk: int) -> None:
        """Answer a chunk: the score of a row is its number in the input."""
        job = keys.job_id(self.run.id, chunk)
        queries, _ = decode_pairs(self.store.payload(self.run, chunk) or b"")
        scores = pa.array([float(query or 0) for query in queries], pa.float32())
        result = ChunkScores(chunk, scores, pa.nulls(len(scores), pa.string()), STATS)
        self.store.write_result(self.run, result)
        self.store.redis.lrem("rq:queue:q", 1, job)
        self.store.redis.unlink(Job.key_for(job))

    def scores(self, work: Callable[[], None]) -> list[float]:
        """All scores in order; `work` is called while the producer waits."""
        self.submission.on_wait = work
        self.submission.fill()
        return [score for part in self.submission.tables() for score in part.scores.to_pylist()]


def pairs(rows: int, start: int = 0, passage: str = "p") -> pa.Table:
    return pa.table({"query": [str(start + row) for row in range(rows)], "passage": [passage] * rows})


@pytest.mark.parametrize("memory", [0, 64 << 20])
def test_a_late_chunk_keeps_no_other_from_being_scored(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.window.Spool", lambda folder: Spool(folder, memory))
    queue = Queue([pairs(3, 3 * chunk) for chunk in range(40)], WindowSize(4, 1 << 20))

    def all_but_the_first() -> None:
        late = queue.waiting()[0]
        for chunk in queue.waiting()[1:] or [late]:
            queue.score(chunk)

    assert queue.scores(all_but_the_first) == list(range(120))
    assert queue.most_waiting == 4
    assert not queue.store.redis.keys("rankmill:run:*")


def test_the_window_follows_the_workers() -> None:
    queue = Queue([pairs(3, 3 * chunk) for chunk in range(600)], WindowSize("auto", 1 << 20))
    seen: list[int] = []

    def workers_come_and_go() -> None:
        waiting = queue.waiting()
        seen.append(len(waiting))
        capacity = Capacity(workers=4 * (len(seen) == 1), claim_ahead=100 * (len(seen) == 1))
        queue.store.redis.set(keys.capacity("q"), capacity.model_dump_json())
        for chunk in waiting[: len(waiting) // 2 or 1]:
            queue.score(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producer.submission._FOLLOW_SECONDS", 0)
        assert queue.scores(workers_come_and_go) == list(range(1800))
    # At first nobody is there; then 4 workers claim 100 pairs, and each up to a chunk of 3 more; then nobody.
    assert (seen[0], seen[1]) == (32, -(-2 * (100 + 4 * 3) // 3))
    assert max(seen[3:]) <= 32


def test_a_worker_says_what_its_queue_claims_ahead(server: Server, workers: StartWorker) -> None:
    environ = {"RANKMILL_HEARTBEAT_SECONDS": "0.2", "RANKMILL_CLAIM_AHEAD": "77"}
    first, second = (workers(environ=environ) for _ in range(2))
    store = RunStore(server.client)
    wait_for(lambda: store.capacity("rankmill") == Capacity(workers=2, claim_ahead=154), second)
    assert 0 < server.client.ttl(keys.capacity("rankmill")) <= 15
    first.terminate()
    wait_for(lambda: store.capacity("rankmill") == Capacity(workers=1, claim_ahead=77), second)


def test_the_window_is_bounded_in_bytes() -> None:
    texts = [
        pairs(1, chunk, bytes(range(33, 126)).decode() * 50 + str(hash(str(chunk)))) for chunk in range(30)
    ]
    queue = Queue(texts, WindowSize(20, 1000))

    def the_first() -> None:
        queue.score(queue.waiting()[0])

    assert queue.scores(the_first) == list(range(30))
    assert 1 <= queue.most_waiting <= 10


def test_without_room_on_disk_no_chunks_are_submitted_until_the_late_one_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("producer.window.Spool", lambda folder: Spool(folder, 0, disk_bytes=5000))
    queue = Queue([pairs(3, 3 * chunk) for chunk in range(40)], WindowSize(4, 1 << 20))
    finished: list[int] = []

    def the_first_last() -> None:
        first, *others = queue.waiting()
        finished.extend(others[-1:])
        queue.score(others[-1] if others else first)

    assert queue.scores(the_first_last) == list(range(120))
    assert "no more chunks are submitted until the oldest is done" in caplog.text
    assert len(finished) < 39


TEXTS = st.lists(
    st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=9)), max_size=5
)


@given(st.lists(TEXTS, max_size=6), st.randoms(), st.sampled_from([0, 100, 1 << 20]))
def test_what_is_put_into_the_spool_is_what_is_taken(
    columns: list[list[str | None]], random: Random, memory: int
) -> None:
    schema = pa.schema([("score", pa.string()), ("error", pa.string())], {"made": "by hand"})
    parts = []
    for texts in columns:
        scores = [None if text is None else float(len(text)) for text in texts]
        errors = [
            reason if score is None else None for reason, score in zip(["bad"] * 9, scores, strict=False)
        ]
        table = pa.table([pa.array(texts, pa.string())] * 2, schema=schema)
        how = (STATS, 1, "w") if texts else (None, 3, "")
        parts.append(ScoredTable(table, pa.array(scores, pa.float32()), pa.array(errors, pa.string()), *how))
    spool = Spool(None, memory)
    places = list(range(len(parts)))
    random.shuffle(places)
    for place in places:
        spool.put(place, parts[place])
    assert len(spool) == len(parts)
    for place, part in enumerate(parts):
        assert place in spool
        taken = spool.take(place)
        assert taken.table.schema.equals(part.table.schema, check_metadata=True)
        assert (taken.table, taken.scores, taken.errors) == (part.table, part.scores, part.errors)
        assert (taken.stats, taken.attempts, taken.worker) == (part.stats, part.attempts, part.worker)
    assert not len(spool)


def test_the_spool_leaves_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 0)
    table = pairs(3)
    spool.put(
        1, ScoredTable(table, pa.array([1.0] * 3, pa.float32()), pa.nulls(3, pa.string()), STATS, 1, "w")
    )
    assert spool.take(1).table == table
    assert list(tmp_path.iterdir()) == []
