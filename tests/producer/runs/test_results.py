"""What comes back for a chunk may be anybody's bytes: it is a whole result, or an attempt that failed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fakeredis
import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rq.job import Job

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import InputError, RunFailed
from rankmill.jobs.contract.keys import parent_of
from rankmill.jobs.contract.results import ChunkFailure, ChunkScores, ChunkStats, to_entry
from rankmill.jobs.contract.wire import encode_scores
from rankmill.jobs.protocol.runs import RunStore
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.driver import RunDriver
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.live import live_run
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import Sizing, WindowSize
from tests.conftest import Server, StartWorker
from tests.harness.runs import stored_run
from tests.harness.waiting import take_out, waiting_jobs

ROWS, CHUNKS = 4, 3
STATS = ChunkStats(
    worker="w", device="cpu", device_name="cpu", backend="torch", precision="fp32", revision="commit",
    attempt=1, tokens=10, padded_tokens=12, batches=1, seconds=0.5,
)  # fmt: skip

Entry = dict[Any, Any]
RUN = "0af"
"""The run of all entries; a test puts them into the stream of its own."""


def good(chunk: int, rows: int = ROWS) -> Entry:
    scores = pa.array(np.arange(rows) + 10.0 * chunk, pa.float32())
    return dict(to_entry(RUN, ChunkScores(chunk * ROWS, scores, pa.nulls(rows, pa.string()), STATS)))


def with_scores(scores: list[float | None], errors: list[str | None]) -> dict[str, bytes]:
    return {"scores": encode_scores(pa.array(scores, pa.float32()), pa.array(errors, pa.string()))}


def with_stats(**changes: object) -> dict[str, str]:
    return {"stats": json.dumps({**STATS.model_dump(), **changes})}


NONE: list[str | None] = [None] * ROWS
BAD: dict[str, Entry] = {
    "null and null": with_scores([1, 2, None, 4], NONE),
    "score and error": with_scores([1, 2, 3, 4], [None, "bad", None, None]),
    "NaN": with_scores([1, float("nan"), 3, 4], NONE),
    "infinite": with_scores([1, float("-inf"), 3, 4], NONE),
    "rows": with_scores([1, 2, 3], NONE[:3]),
    "no rows": with_scores([], []),
    "no payload": {"scores": b"RKML"},
    "no JSON": {"stats": "{"},
    "nested": {"stats": "[" * 100_000},
    "wrong type": with_stats(tokens="many"),
    "too many": with_stats(tokens=1 << 70),
    "unknown field": with_stats(new=1),
    "NaN in the statistics": with_stats(seconds=float("nan")),
    "failure and scores": {"failure": "broken"},
    "not UTF-8": {"failure": b"\xff", "fatal": 0, "attempts": 1, "worker": "", "died": 0},
    "no run": {"run": None},
    "another run": {"run": "0ae"},
    "no chunk": {"chunk": None},
    "another chunk": {"chunk": 99},
    "an odd chunk": {"chunk": b"\xff7"},
    "a negative chunk": {"chunk": -1},
}


def damaged(chunk: int, change: Entry) -> Entry:
    entry = {**good(chunk), **change}
    return {name: value for name, value in entry.items() if value is not None}


def scored(
    answer: Callable[[int, int], list[Entry]], journal: Journal | None = None, max_retries: int = 1
) -> list[ScoredTable]:
    """Three chunks of four rows; `answer` gives the entries for an attempt (from 1) at a chunk."""
    store = RunStore(fakeredis.FakeRedis())
    run = stored_run(store, ttl=100, max_retries=max_retries)
    if journal:
        journal.begin(run.id)
    table = pa.table({"query": ["q"] * ROWS, "passage": ["p"] * ROWS})
    tables, columns = iter([table] * CHUNKS), ("query", "passage")
    kept = live_run(store, run, RunCleaner(store), columns, journal)
    submission = RunDriver(kept, tables, Sizing(ROWS), WindowSize(8, 1 << 20))
    attempts: dict[int, int] = {}

    def work() -> None:
        for job in waiting_jobs(store.redis, "q"):
            take_out(store.redis, job, "q")
            (_, start) = keys.parse_job_id(job) or ("", -1)
            chunk = parent_of(start) // ROWS
            attempts[chunk] = attempts.get(chunk, 0) + 1
            for entry in answer(chunk, attempts[chunk]):
                mine = {**entry, "run": run.id} if entry.get("run") == RUN else entry
                store.redis.xadd(keys.results(run.id), mine)
            store.redis.unlink(Job.key_for(job))

    submission.on_wait = work
    submission.fill()
    parts = list(submission.tables())
    assert not store.redis.keys("rankmill:run:*")
    return parts


def sweep_at_once(patch: pytest.MonkeyPatch) -> None:
    """It may not be known whose result was bad; then its chunk is one that was lost."""
    patch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 0)
    patch.setattr("rankmill.jobs.protocol.runs.RunStore.patrol_seconds", 0.01)


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_bad_result_is_an_attempt_that_failed(change: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_at_once(monkeypatch)
    bad = [damaged(1, change)]
    parts = scored(lambda *attempt: bad if attempt == (1, 1) else [good(attempt[0])])
    assert [part.scores.to_pylist() for part in parts] == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    parts = scored(lambda chunk, _: bad if chunk == 1 else [good(chunk)])
    assert [part.scores.null_count for part in parts] == [0, ROWS, 0]
    assert all(error.startswith("given up after attempt 2: it") for error in parts[1].errors.to_pylist())


def test_a_bad_result_beside_a_good_one_costs_nothing() -> None:
    parts = scored(lambda chunk, _: [damaged(chunk, BAD["NaN"]), good(chunk)], max_retries=0)
    assert not any(part.scores.null_count for part in parts)


def test_a_result_of_another_content_counts_as_a_failed_attempt() -> None:
    other = [damaged(1, with_stats(revision="other"))]
    parts = scored(lambda *attempt: other if attempt == (1, 1) else [good(attempt[0])])
    assert [part.scores.null_count for part in parts] == [0, 0, 0]
    parts = scored(lambda chunk, _: other if chunk == 1 else [good(chunk)])
    assert [part.scores.null_count for part in parts] == [0, ROWS, 0]


def test_a_fatal_failure_of_a_chunk_that_is_not_there_ends_no_run() -> None:
    fatal = dict(to_entry(RUN, ChunkFailure(chunk=99, message="no", fatal=True)))
    assert not any(part.scores.null_count for part in scored(lambda chunk, _: [fatal, good(chunk)]))
    with pytest.raises(RunFailed, match="no"):
        scored(lambda chunk, _: [{**fatal, "chunk": chunk * ROWS}])


PIECES = st.one_of(
    st.binary(max_size=30), st.text(max_size=10), st.integers(), st.none(), st.sampled_from([0, 1, 2])
)
DAMAGE = st.one_of(
    st.sampled_from(list(BAD.values())),
    st.dictionaries(
        st.sampled_from(
            ["chunk", "scores", "stats", "failure", "fatal", "attempts", "worker", "died", "new"]
        ),
        PIECES.filter(lambda piece: not isinstance(piece, str) or piece.isprintable()),
        max_size=4,
    ),
)


@settings(max_examples=40)
@given(changes=st.lists(st.tuples(DAMAGE, st.integers(0, 2**31)), max_size=12))
def test_damaged_results_leave_every_row_with_a_score_or_an_error(changes: list[tuple[Entry, int]]) -> None:
    left = iter(changes)

    def answer(chunk: int, _: int) -> list[Entry]:
        change, place = next(left, ({}, 0))
        entry = damaged(chunk, change) or {"nothing": 1}
        scores = entry.get("scores")
        if place % 2 and isinstance(scores, bytes) and scores:  # a byte of the payload is another
            place %= len(scores)
            entry["scores"] = scores[:place] + bytes([scores[place] ^ 1 + place % 255]) + scores[place + 1 :]
        return [entry]

    with pytest.MonkeyPatch.context() as patch:
        sweep_at_once(patch)
        try:
            parts = scored(answer)
        except RunFailed:
            return
    assert [len(part.table) for part in parts] == [ROWS] * CHUNKS
    for part in parts:
        for score, error in zip(part.scores.to_pylist(), part.errors.to_pylist(), strict=True):
            assert (score is None) != (error is None)
            assert score is None or np.isfinite(score)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.db")
    yield journal
    journal.close()


def write_over(journal: Journal, chunk: int, column: str, value: object) -> None:
    """Damage an entry behind the journal's back."""
    with journal._db as db:
        db.execute(f"UPDATE chunks SET {column} = ? WHERE chunk = ?", (value, chunk * ROWS))


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_bad_result_never_gets_into_the_journal(
    change: Entry, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_at_once(monkeypatch)
    scored(lambda chunk, attempt: [damaged(chunk, change) if attempt == 1 else good(chunk)], journal)
    kept = [journal.get(chunk * ROWS, ROWS) for chunk in range(CHUNKS)]
    assert [result.scores.to_pylist()[0] for result in kept if isinstance(result, ChunkScores)] == [0, 10, 20]


VALUES = st.one_of(
    st.binary(max_size=50),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),  # which SQLite has as NULL, and refuses
    st.sampled_from(["{}", "[1]", '{"chunk": 0}', '{"chunk": 1, "failure": "x", "fatal": 1}', "[" * 100_000]),
)


@pytest.mark.slow
@settings(max_examples=50)  # each is three runs
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["rows", "scores", "about"]), VALUES), max_size=4)
)
def test_what_is_damaged_in_the_journal_is_scored_again(
    tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[int, str, object]]
) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal") / "journal.db")
    scored(lambda chunk, _: [good(chunk)], journal)
    for chunk, column, value in damages:
        write_over(journal, chunk, column, value)
    assert journal.rows >= 0
    again: list[int] = []
    parts = scored(lambda chunk, _: [again.append(chunk) or good(chunk)], journal)  # type: ignore[func-returns-value]
    assert [part.scores.to_pylist()[0] for part in parts] == [0, 10, 20]
    assert set(again) <= {chunk for chunk, _, _ in damages}
    assert journal.first == STATS
    assert len(scored(lambda *_: pytest.fail("all of it is in the journal"), journal)) == CHUNKS
    journal.close()


def test_a_journal_takes_no_result_of_a_run_that_is_not_its_own(journal: Journal, tmp_path: Path) -> None:
    """As where the rows of another output's journal are copied into it."""
    scored(lambda chunk, _: [good(chunk)], journal)
    write_over(journal, 1, "about", json.dumps({"run": "0ae", "chunk": ROWS, "stats": STATS.written()}))
    again: list[int] = []
    parts = scored(lambda chunk, _: [again.append(chunk) or good(chunk)], journal)  # type: ignore[func-returns-value]
    assert again == [1]
    assert [part.scores.to_pylist()[0] for part in parts] == [0, 10, 20]


def test_a_journal_of_another_format_is_refused_in_a_line_that_names_both(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    Journal(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(InputError, match=r"journal.db has format 7, this release reads 1: .* --restart"):
        Journal(path)


def test_a_neighbours_results_in_the_stream_change_nothing(
    server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=ROWS)
    pairs = [("big cat", f"moon river {number}") for number in range(ROWS * len(BAD))]
    run = client.submit(pairs)
    for chunk, change in enumerate(BAD.values()):
        server.client.xadd(keys.results(run.id), damaged(chunk, change))
    server.client.unlink(
        *(Job.key_for(keys.job_id(run.id, start)) for start in (0, ROWS))
    )  # as if it were theirs
    workers()
    assert np.isfinite(run.scores(timeout=100)).all()
    assert not run.errors


@pytest.mark.parametrize("detached", [False, True])
def test_results_of_another_run_are_not_taken(
    detached: bool, server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    """Its stream has chunks with the same numbers and as many rows, from the same model."""
    client = Client(server.url, model=str(tiny_model), precision="fp32", chunk_size=ROWS)
    mine = [("big cat", f"moon river {number}") for number in range(5 * ROWS)]
    worker = workers()
    expected = client.score(mine, timeout=60)
    other = client.submit([(passage, query) for query, passage in mine], detached=True)
    assert np.abs(other.scores(timeout=60) - expected).max() > 1e-3
    worker.terminate()
    worker.wait(timeout=60)
    run = client.submit(mine, detached=detached)
    redis: Any = server.client
    for _, entry in redis.xrange(keys.results(other.id)):
        redis.xadd(keys.results(run.id), entry)
    workers()
    np.testing.assert_allclose(run.scores(timeout=60), expected, atol=1e-5)
    assert not run.errors
    assert run.stats.retries == 0


def test_a_journal_that_cannot_be_read_is_not_held_open(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"no database " * 1000)
    with pytest.raises(InputError):
        Journal(tmp_path / "journal.db")
    assert not [each for each in psutil.Process().open_files() if Path(each.path).parent == tmp_path]
