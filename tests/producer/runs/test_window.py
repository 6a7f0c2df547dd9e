"""A late chunk keeps no other from being scored; what waits for it is in memory or on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RedisUnavailable, RunTimeout
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.protocol.queues import QueueCapacity
from rankmill.jobs.protocol.runs import RunStore
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import Sizing, WindowSize
from rankmill.producer.collect.spool import Spool
from tests.conftest import Server, StartWorker, wait_for
from tests.harness.queue_by_hand import STATS, QueueByHand, pairs
from tests.harness.servers.disks import small_disk


@pytest.mark.parametrize("memory", [0, 64 << 20])
def test_a_late_chunk_keeps_no_other_from_being_scored(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver.Spool", lambda folder: Spool(folder, memory))
    queue = QueueByHand([pairs(3, 3 * chunk) for chunk in range(40)], WindowSize(4, 1 << 20))

    def all_but_the_first() -> None:
        late = queue.waiting()[0]
        for chunk in queue.waiting()[1:] or [late]:
            queue.score(chunk)

    assert queue.scores(all_but_the_first) == list(range(120))
    assert queue.most_waiting == 4
    assert not queue.store.redis.keys("rankmill:run:*")


def test_workers_that_are_quicker_than_the_caller_fill_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver.Spool", lambda folder: Spool(folder, 60_000))
    monkeypatch.setattr(
        "rankmill.producer.collect.spool.tempfile.TemporaryFile", lambda **_: pytest.fail("a file was made")
    )
    monkeypatch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 0)
    queue = QueueByHand([pairs(1, row, "p" * 1000) for row in range(300)], WindowSize(16, 1 << 20))
    results = queue.store.results

    def results_of_all(*arguments: Any, **options: Any) -> Any:
        queue.score_all()
        return results(*arguments, **options)

    monkeypatch.setattr(queue.store, "results", results_of_all)
    assert queue.scores(lambda: None) == list(range(300))
    assert queue.most_waiting == 16


def test_the_window_follows_the_workers() -> None:
    queue = QueueByHand([pairs(3, 3 * chunk) for chunk in range(600)], WindowSize("auto", 1 << 20))
    seen: list[int] = []

    def workers_come_and_go() -> None:
        waiting = queue.waiting()
        seen.append(len(waiting))
        capacity = QueueCapacity(workers=4 * (len(seen) == 1), claim_ahead=100 * (len(seen) == 1))
        queue.store.redis.set(keys.capacity("q"), capacity.model_dump_json())
        for chunk in waiting[: len(waiting) // 2 or 1]:
            queue.score(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 0)
        assert queue.scores(workers_come_and_go) == list(range(1800))
    # At first nobody is there; then 4 workers claim 100 pairs, and each up to a chunk of 3 more; then nobody.
    assert (seen[0], seen[1]) == (32, -(-2 * (100 + 4 * 3) // 3))
    assert max(seen[3:]) <= 32


def test_the_window_is_filled_with_the_first_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick worker would score the few first chunks before the producer next looks at the workers."""
    monkeypatch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 1e7)
    monkeypatch.setattr(
        "tests.harness.queue_by_hand.STATS", STATS.model_copy(update={"device_seconds": 0.01})
    )
    tables = [pairs(16, 16 * chunk) for chunk in range(100)]
    sizing = Sizing("auto")
    queue = QueueByHand(tables, WindowSize("auto", 1 << 20), sizing=sizing)
    queue.driver.begin()
    seen: list[int] = []

    def the_first() -> None:
        seen.append(len(queue.waiting()))
        queue.score(queue.waiting()[0])

    queue.scores(the_first)
    assert seen[:2] == [8, 32]


def test_a_server_that_is_away_is_asked_for_workers_once_a_patrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 1e7)
    monkeypatch.setattr(
        "tests.harness.queue_by_hand.STATS", STATS.model_copy(update={"device_seconds": 0.01})
    )
    sizing = Sizing("auto")
    queue = QueueByHand(
        [pairs(16, 16 * chunk) for chunk in range(20)], WindowSize("auto", 1 << 20), sizing=sizing
    )
    asked = []

    def away(name: str) -> QueueCapacity:
        asked.append(name)
        raise RedisUnavailable("it is away")

    monkeypatch.setattr(queue.store, "capacity", away)
    queue.driver.begin()
    queue.scores(lambda: queue.score(queue.waiting()[0]))
    assert asked == ["q"] * 2  # when it began, and with its first result


def test_a_request_asks_for_its_scores_alone(
    server: Server, workers: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further command is a round trip in which its caller waits."""
    workers()
    client = Client(server.url, model="demo")
    client.score([("q", "p")], timeout=60)  # now the size of chunks is known
    monkeypatch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 30)
    asked: list[object] = []
    monkeypatch.setattr(client.store, "capacity", asked.append)
    client.score([("q", "other")], timeout=60)
    assert not asked


def test_a_worker_says_what_its_queue_claims_ahead(server: Server, workers: StartWorker) -> None:
    environ = {"RANKMILL_HEARTBEAT_SECONDS": "0.2", "RANKMILL_CLAIM_AHEAD": "77"}
    first, second = (workers(environ=environ) for _ in range(2))
    store = RunStore(server.client)
    wait_for(lambda: store.capacity("rankmill") == QueueCapacity(workers=2, claim_ahead=154), second)
    assert 0 < server.client.ttl(keys.capacity("rankmill")) <= 15
    first.terminate()
    wait_for(lambda: store.capacity("rankmill") == QueueCapacity(workers=1, claim_ahead=77), second)


def test_the_window_is_bounded_in_bytes() -> None:
    texts = [
        pairs(1, chunk, bytes(range(33, 126)).decode() * 50 + str(hash(str(chunk)))) for chunk in range(30)
    ]
    queue = QueueByHand(texts, WindowSize(20, 1000))

    def the_first() -> None:
        queue.score(queue.waiting()[0])

    assert queue.scores(the_first) == list(range(30))
    assert 1 <= queue.most_waiting <= 10


def test_a_full_disk_pauses_submitting_until_the_late_chunk_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shows: there is no room for results that wait for an earlier chunk."""
    monkeypatch.setattr(
        "rankmill.producer.collect.driver.Spool", lambda folder: Spool(folder, 0, disk_bytes=5000)
    )
    queue = QueueByHand([pairs(3, 3 * chunk) for chunk in range(40)], WindowSize(4, 1 << 20))
    finished: list[ChunkId] = []

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
        lengths = pa.array([None if text is None else len(text) for text in texts], pa.int32())
        counted = lengths if random.random() < 0.5 else None
        part = ScoredTable(table, pa.array(scores, pa.float32()), pa.array(errors, pa.string()), *how)
        parts.append(replace(part, tokens=counted))
    spool = Spool(None, memory)
    places = list(range(len(parts)))
    random.shuffle(places)
    for place in places:
        spool.put(place, parts[place])
    assert len(spool) == len(parts)
    for place, part in enumerate(parts):
        taken = spool.take(place)
        assert taken.table.schema.equals(part.table.schema, check_metadata=True)
        assert (taken.table, taken.scores, taken.errors) == (part.table, part.scores, part.errors)
        assert taken.tokens == part.tokens
        assert (taken.stats, taken.attempts, taken.worker) == (part.stats, part.attempts, part.worker)
    assert not len(spool)


def test_the_spool_leaves_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 0)
    table = pairs(3)
    spool.put(
        1, ScoredTable(table, pa.array([1.0] * 3, pa.float32()), pa.nulls(3, pa.string()), STATS, 1, "w")
    )
    assert spool.take(1).table == table
    bare = table.select([])  # of a detached run
    spool.put(
        2, ScoredTable(bare, pa.array([1.0] * 3, pa.float32()), pa.nulls(3, pa.string()), STATS, 1, "w")
    )
    assert len(spool.take(2).table) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [100, 400, 2000])
def test_a_chunk_that_a_full_disk_refuses_waits_in_memory(tmp_path: Path, rows: int) -> None:
    """It is refused whole, in its first bytes, or in its last ones."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        spool, parts = Spool(disk, 0), list[ScoredTable]()
        while not spool.full:
            ones, none = pa.array([1.0] * rows, pa.float32()), pa.nulls(rows, pa.string())
            parts.append(ScoredTable(pairs(rows, rows * len(parts)), ones, none, STATS, 1, "w"))
            spool.put(len(parts) - 1, parts[-1])
        for chunk, part in enumerate(parts):
            assert spool.take(chunk).table == part.table
        spool.close()


def test_the_room_of_chunks_that_are_taken_is_used_again(tmp_path: Path) -> None:
    """Some chunk waits on disk at every moment of a long run."""
    spool = Spool(tmp_path, 0, disk_bytes=10_000)
    table = pairs(3)
    part = ScoredTable(table, pa.array([1.0] * 3, pa.float32()), pa.nulls(3, pa.string()), STATS, 1, "w")
    spool.put(0, part)
    for chunk in range(1, 40):
        spool.put(chunk, part)
        assert spool.take(chunk - 1).table == table
        assert not spool.full


def test_a_producer_that_has_long_heard_nothing_asks_less_often(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankmill.producer.collect.driver._PATROL_SHARE", 1.0)
    run = Client(server.url, model="demo").submit([("q", "p")])
    before = server.client.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"]
    with pytest.raises(RunTimeout):
        run.scores(timeout=4.0)
    asked = server.client.info("commandstats")["cmdstat_xread"]["calls"] - before
    assert 4 <= asked <= 10  # 20, five times a second
    run.cancel()
