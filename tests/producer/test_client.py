"""The client, for other services: any kind of pairs, in order, many runs at once."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import datasets
import duckdb
import fakeredis
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from benchmarks.faults.outages import replica
from rankmill import AsyncClient, Client, CrossEncoder
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import (
    ConfigError,
    ConnectionFailed,
    InputError,
    NoWorkers,
    RunCancelled,
    RunFailed,
    RunTimeout,
)
from rankmill.jobs.contract.results import ChunkScores
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.wire import decode_rows
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import QueueWorkers
from rankmill.producer.collect import pairs as pairs_module
from rankmill.producer.collect.pairs import CHUNK_TEXT_BYTES
from rankmill.producer.collect.presence import WorkerPresence
from rankmill.producer.collect.sizing import Sizing
from rankmill.testing import FakeClient
from tests.conftest import Server
from tests.harness.auto import AUTO
from tests.harness.models.tiny import cross_encoder
from tests.harness.servers.valkey import nothing_left
from tests.harness.waiting import waiting_jobs
from tests.producer.runs.test_results import STATS
from tests.workers.engine.test_engine import some_pairs

PAIRS = list(zip(*some_pairs(90), strict=True))


@pytest.fixture
def client(shared_queue: Server, tiny_model: Path) -> Client:
    return Client(shared_queue.url, model=str(tiny_model), precision="fp32", chunk_size=16, window=3)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> np.ndarray:
    return np.asarray(cross_encoder(tiny_model).predict(PAIRS))


@pytest.mark.parametrize("kind", ["list", "generator", "lists", "data frame", "table", "batch"])
def test_any_kind_of_pairs_is_scored_in_order(kind: str, client: Client, expected: np.ndarray) -> None:
    columns = {"query": [query for query, _ in PAIRS], "passage": [passage for _, passage in PAIRS]}
    pairs = {
        "list": PAIRS,
        "generator": (pair for pair in PAIRS),
        "lists": [list(pair) for pair in PAIRS],
        "data frame": pd.DataFrame(columns),
        "table": pa.table(columns),
        "batch": pa.record_batch(columns),
    }[kind]
    scores = client.score(pairs, timeout=60)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_scores_come_one_by_one_while_the_input_goes_on(client: Client) -> None:
    endless = ((f"cat {number}", "the moon") for number in itertools.count())
    run = client.submit(endless)
    first = list(itertools.islice(run, 40))
    assert np.isfinite(first).all()
    run.cancel()
    assert not list(client.store.redis.scan_iter(f"rankmill:run:{run.id}:*"))


def test_a_run_keeps_no_threads_while_it_waits(server: Server) -> None:
    client = Client(server.url, model="demo", chunk_size=1, window=8)
    others = set(threading.enumerate())
    run = client.submit(PAIRS)
    assert not [thread for thread in set(threading.enumerate()) - others if "encode" in thread.name]
    run.cancel()


def test_chunks_are_submitted_several_at_a_time(server: Server) -> None:
    client = Client(server.url, model="demo", chunk_size=1, window=8)
    run = client.submit((f"q {n}", "p") for n in range(20))
    submitted = run._drivers[0]

    def waiting() -> int:
        return client.store.queue("rankmill").count

    def finish(chunk: int) -> None:
        scored = ChunkScores(chunk, pa.array([float(chunk)], pa.float32()), pa.nulls(1, pa.string()), STATS)
        client.store.write_result(submitted.run, scored)

    def take() -> float:
        (score,) = next(parts).scores.to_pylist()
        return float(score)

    parts = run.tables()
    assert waiting() == 8
    for chunk in (1, 2, 3, 0):
        finish(chunk)
    assert [(take(), waiting()) for _ in range(4)] == [(0, 12), (1, 12), (2, 12), (3, 12)]
    finish(4)
    assert (take(), waiting()) == (4, 12)  # a quarter of the window is filled at once
    finish(5)
    assert (take(), waiting()) == (5, 14)
    run.cancel()


@pytest.mark.parametrize("kind", ["tuples", "table", "dictionary"])
def test_a_long_query_that_repeats_makes_smaller_chunks(kind: str, server: Server) -> None:
    query, rows = "long " * 200_000, 100
    pairs: Any = [(query, f"passage {row}") for row in range(rows)]
    if kind != "tuples":
        repeated = pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array([query]))
        texts = repeated if kind == "dictionary" else repeated.cast(pa.string())
        pairs = pa.table({"query": texts, "passage": [passage for _, passage in pairs]})
    client = Client(server.url, model="demo", chunk_size=rows, window=rows)
    run = client.submit(pairs)
    redis = client.store.redis
    sent = [decode_rows(redis.get(key), "pairs") for key in redis.scan_iter("rankmill:run:*:pairs:*")]
    run.cancel()
    assert {passage for _, passages in sent for passage in passages} == {
        f"passage {row}" for row in range(rows)
    }
    assert all(queries.count(query) * len(query) <= CHUNK_TEXT_BYTES for queries, _ in sent)


def test_no_more_of_a_generators_long_texts_is_read_than_fits_into_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows of a chunk were read before their texts were counted, and characters as bytes."""
    monkeypatch.setattr(pairs_module, "CHUNK_TEXT_BYTES", 1000)
    read = cut = 0

    def pairs() -> Iterator[tuple[str, str]]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield "q", "月" * 200

    for table in pairs_module.cut_pairs(pairs(), pairs_module.COLUMNS, Sizing(100)):
        assert read - cut <= 5
        assert len(table) == 1  # two have 1,202 bytes
        cut += len(table)
    assert cut == 100


def test_many_runs_at_once_over_one_connection(client: Client, expected: np.ndarray) -> None:
    runs = [client.submit(PAIRS[start:]) for start in range(8)]
    for start in reversed(range(8)):
        np.testing.assert_allclose(runs[start].scores(60), expected[start:], atol=1e-5)


def test_rank_puts_the_best_first(client: Client) -> None:
    passages = [passage for _, passage in PAIRS[:20]]
    ranked = client.rank("the big cat", passages, timeout=60)
    scores = client.score([("the big cat", passage) for passage in passages])
    assert [each.index for each in ranked] == np.argsort(-scores, kind="stable").tolist()
    assert [each.score for each in client.rank("the big cat", passages, top_k=3)] == sorted(
        scores, reverse=True
    )[:3]
    assert client.rank("the big cat", []) == []


def test_rows_that_cannot_be_scored_are_told_apart(client: Client) -> None:
    run = client.submit([("q", "p"), (None, "p"), ("q", "lone \ud800 surrogate")])
    scores = run.scores(60)
    assert np.isnan(scores).tolist() == [False, True, False]
    assert run.errors == {1: "query is null"}


def test_spec_can_differ_from_run_to_run(client: Client) -> None:
    logits = client.score(PAIRS, activation="identity")
    np.testing.assert_allclose(
        client.score(PAIRS, activation="sigmoid"), 1 / (1 + np.exp(-logits)), atol=1e-6
    )


def test_an_iteration_that_was_left_in_a_chunk_is_not_taken_up(client: Client) -> None:
    """The next one began with the next chunk, and left out rows without a word."""
    run = client.submit(PAIRS)
    assert np.isfinite(next(iter(run)))
    with pytest.raises(InputError, match="was read in part, and gives each row only once"):
        next(iter(run))
    run.cancel()


def test_a_wait_ends_in_time_and_may_be_taken_up_again(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model))
    run = client.submit(PAIRS)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"0 rows were done when .* over; the run goes on: ask"):
            run.scores(timeout=0.3)
    assert time.monotonic() - started < 50
    with pytest.raises(RunTimeout, match="0 rows were done when the time was over; the run is cancelled"):
        client.score(PAIRS, timeout=0.1)
    run.cancel()
    left = {key.decode() for key in server.client.scan_iter("rankmill:*")}
    of_queue = {keys.bell("rankmill"), keys.waits("rankmill"), keys.turns("rankmill", "request")}
    assert left <= {keys.queues(), *of_queue}
    assert not waiting_jobs(server.client)
    with pytest.raises(RunCancelled):
        run.scores()


def test_no_wait_at_the_server_is_longer_than_the_time_that_is_left(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server.url, model="demo")
    waits: list[int] = []
    results = client.store.results

    def noted(run: Run, *, block_ms: int, **more: Any) -> Any:
        waits.append(block_ms)
        return results(run, block_ms=block_ms, **more)

    monkeypatch.setattr(client.store, "results", noted)
    run = client.submit(PAIRS)
    with pytest.raises(RunTimeout):
        run.scores(timeout=0.05)
    run.cancel()
    assert waits
    assert max(waits) <= 50


def test_a_run_does_not_miss_workers_while_another_run_looks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def look(*_: object) -> QueueWorkers:
        nonlocal looks
        looks += 1
        presence.check(since=-3600)  # as another run's task or thread does meanwhile
        return QueueWorkers(scoring=frozenset({"w"}), other=frozenset())

    monkeypatch.setattr(RunStore, "workers", look)
    presence = WorkerPresence(RunStore(fakeredis.FakeRedis()), "redis://r", "q", seconds=60)
    presence.check(since=-3600)
    assert looks == 1


def test_a_wait_for_workers_that_are_not_there_ends_with_a_word(server: Server) -> None:
    client = Client(server.url, model="demo", queue="nobody", no_workers_seconds=0.6)
    run = client.submit(PAIRS)
    with pytest.raises(NoWorkers, match=r"no worker listens on queue 'nobody'.*score-workers.* run goes on"):
        run.scores(timeout=60)
    assert client.store.queue("nobody").count == len(run._drivers[0].collector.pieces)
    run.cancel()
    with pytest.raises(NoWorkers, match="the run is cancelled"):
        client.score(PAIRS, timeout=60)
    assert not client.store.queue("nobody").count
    assert not list(server.client.scan_iter("rankmill:run:*"))


def test_workers_are_missed_on_the_queue_of_the_run(shared_queue: Server) -> None:
    """A run was said to have no worker if the client's own queue had none, and to have one if that had."""
    run = Client(shared_queue.url, model="demo", queue="nobody").submit(PAIRS, detached=True)
    other = Client(shared_queue.url, model="demo", no_workers_seconds=0.6)
    with pytest.raises(NoWorkers, match="no worker listens on queue 'nobody'"):
        other.attach(run.id).wait(30)
    run.cancel()


def test_few_pairs_are_a_request_for_each_of_several_models() -> None:
    client = FakeClient()
    client.score_models(PAIRS[:3], ["a", "b"])
    client.score_models(iter(PAIRS), ["a", "b"])
    of_runs = [(run.asked.priority, run.asked.rows) for run in client.fake_workers.runs]
    assert of_runs == [("request", 3)] * 2 + [("bulk", None)] * 2


def test_workers_that_cannot_say_that_they_are_there_are_not_missed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(server.url, model="demo", queue="nobody", no_workers_seconds=0.6)
    run = client.submit(PAIRS)
    with replica(server.client), pytest.raises(RunTimeout):  # it answers, and takes no writes
        run.scores(timeout=3)
    assert "READONLY" in caplog.text
    assert "no worker listens" not in caplog.text
    with pytest.raises(NoWorkers):
        run.scores(timeout=60)


def test_a_typo_in_an_option_is_named_with_the_option_that_was_meant(shared_server: Server) -> None:
    url = shared_server.url
    typed = Client(url, model="demo", queue="nobody")
    client: Any = typed
    made: Any = Client
    calls: list[tuple[str, Callable[[], object]]] = [
        (  # so that mypy finds it: without its error, this comment would be one
            "modle: there is no such option, the nearest is model",
            lambda: typed.score(PAIRS, modle="m"),  # type: ignore[call-arg]
        ),
        ("topk: there is no such option, the nearest is top_k", lambda: client.rank("q", ["p"], topk=3)),
        ("prority: .* the nearest is priority", lambda: client.submit(PAIRS, prority="bulk")),
        ("max_lenght: .* is max_length", lambda: client.submit(PAIRS, detached=True, max_lenght=9)),
        ("timeuot: .* is timeout", lambda: client.score_models(PAIRS, ["demo"], timeuot=9)),
        ("topk: .* is top_k", lambda: client.submit_file("a.csv", "b.csv", topk=3)),
        ("modle: .* is model", lambda: client.submit_file("a.csv", "b.csv", modle="m")),
        (r"quue: .* is queue \(set in the options given\)", lambda: made(url, quue="q")),
        ("max_lenth: .* is max_length", lambda: CrossEncoder("demo", redis_url=url, max_lenth=9)),
        ("timeout: there is no such option$", lambda: client.submit(PAIRS, timeout=9)),
    ]
    for message, call in calls:
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize("top_k", [0, -1, 2.0, "3", True])
def test_a_number_of_passages_is_one(shared_server: Server, top_k: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^top_k is {re.escape(repr(top_k))}; give a number of at least 1"
    ):
        Client(shared_server.url, model="demo", queue="nobody").rank("q", ["p"], top_k=top_k)


def test_the_first_chunks_are_in_the_queue_when_submit_returns(server: Server) -> None:
    """Whether anybody reads the run, now or later, and whatever the pairs are."""

    def waiting() -> int:
        return len(waiting_jobs(server.client))

    many = [("q", f"p {number}") for number in range(2000)]
    client = Client(server.url, model="demo", chunk_size=10, window=20)
    for pairs in (many, iter(many), pa.table({"query": ["q"] * 2000, "passage": ["p"] * 2000}), many[:200]):
        run = client.submit(pairs)
        assert waiting() == 20
        run.cancel()

    async def submit() -> None:
        async with AsyncClient(server.url, model="demo", chunk_size=10, window=20) as waits:
            run = await waits.submit(many)
            assert waiting() == 20
            await run.cancel()

    asyncio.run(submit())
    assert not waiting()


def test_scores_and_ranks_have_the_reasons_beside_nan(client: Client) -> None:
    scores = client.score([("q", "p"), (None, "p")], timeout=60)
    assert np.isnan(scores).tolist() == [False, True]
    assert scores.errors == {1: "query is null"}
    assert not getattr(scores * 2, "errors", None)
    sent = pickle.loads(pickle.dumps(scores))  # to another process
    np.testing.assert_array_equal(sent, scores)
    assert (type(sent), sent.errors) == (type(scores), scores.errors)
    passages: Any = ["the moon", None, "cheese"]
    last = client.rank("how far", passages, timeout=60)[-1]
    assert (last.index, last.error) == (1, "passage is null")
    assert np.isnan(last.score)


@pytest.mark.scores
def test_auto_is_one_of_the_exact_precisions_and_the_one_that_is_tested(
    shared_queue: Server, tiny_model: Path
) -> None:
    run = Client(shared_queue.url, model=str(tiny_model)).submit(PAIRS[:3])
    run.scores(60)
    assert run.stats.precision in {os.environ.get(AUTO, "fp32"), os.environ.get(AUTO, "bf16")}


def test_a_run_says_how_it_was_scored(client: Client) -> None:
    run = client.submit([*PAIRS, ("q", None)])
    run.scores(60)
    stats = run.stats
    assert (stats.rows, stats.chunks, stats.retries) == (91, 6, 0)
    assert (stats.precision, list(stats.workers.values())) == ("fp32", [91])
    assert 91 < stats.tokens <= stats.padded_tokens
    assert (run.progress.rows, run.progress.row_errors) == (91, 1)


def test_threads_share_a_client(client: Client, expected: np.ndarray) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda start: client.score(PAIRS[start:], timeout=60), range(24)))
    for start, scores in enumerate(found):
        np.testing.assert_allclose(scores, expected[start:], atol=1e-5)


def test_a_forked_child_has_connections_of_its_own(client: Client, expected: np.ndarray) -> None:
    run = client.submit(PAIRS)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            scores = client.score(PAIRS[:20], timeout=60)
            own = client.store.redis.client_id()
            os.write(writing, pickle.dumps((np.asarray(scores), own)))
        finally:
            os._exit(0)
    os.close(writing)
    np.testing.assert_allclose(run.scores(60), expected, atol=1e-5)
    ids = {client.store.redis.client_id() for _ in range(3)}
    with open(reading, "rb") as pipe:  # noqa: PTH123
        scores, other = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    np.testing.assert_allclose(scores, expected[:20], atol=1e-5)
    assert other not in ids


def test_a_run_that_cannot_be_scored_says_why(client: Client) -> None:
    with pytest.raises(RunFailed, match="cannot get model some/nonsense"):
        client.score(PAIRS, model="some/nonsense", timeout=60)


@pytest.mark.parametrize("pair", ["ab", ("q",), ("q", 5), 7, ("q", "p", "x"), (b"q", b"p")])
def test_what_is_no_pair_is_named(pair: Any, client: Client, shared_queue: Server) -> None:
    refused = pytest.raises(InputError, match=r"pair 1 is .*, not a query and a passage")
    with nothing_left(shared_queue), refused:
        client.submit([("q", "p"), pair])


class _Relation:
    """A table of a library that gives Arrow's stream, as DuckDB's relations and Polars' data frames do."""

    columns = ("query", "passage")

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_any_table_that_gives_arrows_stream_is_scored(client: Client) -> None:
    columns = [pa.array(texts, pa.string_view()) for texts in zip(*PAIRS, strict=True)]
    table = pa.table(columns, names=["query", "passage"])
    expected = client.score(PAIRS, timeout=60)
    for pairs in (_Relation(table), table.to_reader(), table.to_batches()[0]):
        np.testing.assert_allclose(client.score(pairs, timeout=60), expected, atol=1e-5)


def frames() -> dict[str, Callable[[], Any]]:
    """What people hold, of the libraries themselves; each is made when it is asked for."""
    rows = [{"query": query, "passage": passage, "n": n} for n, (query, passage) in enumerate(PAIRS)]
    table = pa.Table.from_pylist(rows)
    structured = [("query", object), ("passage", object)]
    return {
        "polars": lambda: pl.from_arrow(table),
        "polars in parts": lambda: pl.concat([pl.DataFrame(table[:40]), pl.DataFrame(table[40:])]),
        "a relation": lambda: duckdb.from_arrow(table).filter("n >= 0").order("n"),
        "a dataset": lambda: datasets.Dataset.from_list(rows),
        "a dataset in another order": lambda: datasets.Dataset.from_list(rows[::-1]).sort("n"),
        "a dataset that is iterated": lambda: datasets.Dataset.from_list(rows).to_iterable_dataset(),
        "a generator's dataset": lambda: datasets.IterableDataset.from_generator(lambda: iter(rows)),
        "a frame with a column that Arrow has no type for": lambda: pd.DataFrame(
            [row | {"other": [1, "x"]} for row in rows]
        ),
        "dicts": lambda: rows,
        "an array": lambda: np.array(PAIRS),
        "an array of objects": lambda: np.array(PAIRS, object),
        "a structured array": lambda: np.array(PAIRS, structured),
        "a reader": lambda: table.to_reader(16),
    }  # fmt: skip


@pytest.mark.parametrize("kind", frames())
def test_what_people_hold_is_scored(kind: str, client: Client, expected: np.ndarray) -> None:
    np.testing.assert_allclose(client.score(frames()[kind](), timeout=60), expected, atol=1e-5)
    run = client.submit(frames()[kind](), detached=True)
    np.testing.assert_allclose(run.scores(60), expected, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["polars", "a relation", "a dataset", "dicts", "an array", "a structured array"]
)
def test_the_cross_encoder_takes_frames_too(
    kind: str, shared_queue: Server, tiny_model: Path, expected: np.ndarray
) -> None:
    model = CrossEncoder(str(tiny_model), redis_url=shared_queue.url, precision="fp32")
    np.testing.assert_allclose(model.predict(frames()[kind]()), expected, atol=1e-5)
    prompted = model.predict([("moon: " + query, passage) for query, passage in PAIRS])
    found = model.predict(frames()[kind](), prompt="moon: ")
    np.testing.assert_allclose(found, prompted, atol=1e-5)
    assert abs(found - expected).max() > 1e-3


def test_a_stream_is_read_while_its_run_goes_on(client: Client) -> None:
    """Also of one that is endless, no more is read than the window holds."""
    read: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in itertools.count():
            read.append(number)
            yield pa.record_batch({"query": [f"cat {number}"] * 16, "passage": ["the moon"] * 16})

    schema = pa.schema({"query": pa.string(), "passage": pa.string()})
    run = client.submit(pa.RecordBatchReader.from_batches(schema, batches()))
    assert np.isfinite(list(itertools.islice(run, 40))).all()
    assert (len(read) < 40, run.rows) == (True, None)
    run.cancel()


def test_a_stream_that_breaks_is_one_line(client: Client, shared_queue: Server) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"query": ["q"] * 16, "passage": ["p"] * 16})
        raise OSError("the disk is gone")

    schema = pa.schema({"query": pa.string(), "passage": pa.string()})
    with (
        nothing_left(shared_queue),
        pytest.raises(InputError, match=r"could not be read to its end: .*the disk is gone$"),
    ):
        client.score(pa.RecordBatchReader.from_batches(schema, batches()), timeout=60)


def test_a_generators_dataset_has_no_types_before_its_end(client: Client) -> None:
    """A null has another type than a text; numbers are none."""
    passages: list[Any] = [None] * 20 + ["the moon"] * 20
    made = datasets.IterableDataset.from_generator
    scores = client.score(made(lambda: ({"query": "q", "passage": each} for each in passages)), timeout=60)
    assert np.isnan(scores).tolist() == [True] * 20 + [False] * 20
    passages += [3] * 20
    with pytest.raises(InputError, match=r"pair 40 is \['q', 3\], not a query and a passage"):
        client.score(made(lambda: ({"query": "q", "passage": each} for each in passages)), timeout=60)


@pytest.mark.parametrize("inputs", get_args(Inputs))
def test_a_dataset_without_rows_has_the_columns_that_are_asked_for(inputs: Inputs) -> None:
    empty: Any = datasets.IterableDataset.from_generator(lambda: iter(()))
    columns = pairs_module.USUAL_COLUMNS[inputs]
    assert list(pairs_module.cut_pairs(empty, columns, Sizing(10), inputs)) == []


class _Closed:
    """A table without Arrow's stream, as of an old release."""

    columns = ("query", "passage")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            _Closed(),
            r"pairs are _Closed, which cannot be read; give \(query, passage\) tuples, dicts, or a table",
        ),
        ([{"query": "q", "text": "p"}], "pair 0 has no 'passage'; it has 'query', 'text'"),
        (np.array(["q", "p"]), r"an array of shape \(2,\); give one of shape \[n, 2\]"),
        (np.array([["q", "p", "x"]]), r"an array of shape \(1, 3\)"),
        (np.array([[1, 2]]), r"pair 0 is \[1, 2\], not a query and a passage"),
        (pl.DataFrame({"query": ["q"], "text": ["t"]}), "no column 'passage'; there are 'query', 'text'"),
        (pl.DataFrame({"query": ["q"]}).lazy(), "pairs are LazyFrame, which cannot be read"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"query": ["q"]})}),
            "its splits: 'train'",
        ),
        (datasets.Dataset.from_dict({"query": ["q"]}), "no column 'passage'; there are 'query'"),
        (None, "give one of pairs, texts and messages, not 0"),
        ("a query", "pairs are str, which cannot be read"),
        ({"query": ["q"], "passage": ["p"]}, "pairs are dict, which cannot be read"),
        (pd.Series(["q"]), "pairs are Series, which is not a table of texts: "),
        (pd.DataFrame({"query": ["q", 5], "passage": "p"}), "pairs are DataFrame, .* column query"),
        (pd.DataFrame({"query": [1], "passage": ["p"]}), "column 'query' holds int64, not text"),
        (
            pa.table([["q"], ["r"], ["p"]], names=["query", "query", "passage"]),
            "two columns are named 'query'",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_are_no_pairs_is_one_line(
    pairs: Any, message: str, client: Client, shared_queue: Server
) -> None:
    refused = pytest.raises(InputError, match=message)
    with nothing_left(shared_queue), refused as caught:
        client.score(pairs)
    assert "\n" not in str(caught.value)


def test_one_string_is_no_list_of_passages(client: Client) -> None:
    with pytest.raises(InputError, match="passages are one string, 'moon'; give a list of them"):
        client.rank("how far", "moon")


def test_missing_columns_are_named(client: Client) -> None:
    with pytest.raises(InputError, match="no column 'passage'; there are 'query', 'text'"):
        client.submit(pd.DataFrame({"query": ["q"], "text": ["t"]}))


def test_bad_options_are_named(client: Any) -> None:
    with pytest.raises(ConfigError, match="precision: "):
        client.submit(PAIRS, precision="fp7")
    with pytest.raises(ConfigError, match="speed: "):
        client.submit(PAIRS, speed="high")
    with pytest.raises(ConfigError, match=r"queues: .*set in the options given"):
        Client("redis://127.0.0.1:1", queues="q")  # type: ignore[call-arg]


def test_a_client_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="give redis_url or set REDIS_URL"):
        Client()
    with pytest.raises(ConnectionFailed, match=r"no usable Redis at redis://127\.0\.0\.1:1"):
        Client("redis://127.0.0.1:1")


def test_importing_the_producer_is_light() -> None:
    code = (
        "import rankmill.producer, sys; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
