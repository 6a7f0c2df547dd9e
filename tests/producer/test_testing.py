"""The fake clients keep the contract of the real ones: the tests pass with both, plain and in asyncio."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rankmill import (
    AsyncClient,
    Client,
    ConfigError,
    CrossEncoder,
    InputError,
    NoWorkers,
    Ranked,
    RunCancelled,
    RunExpired,
    RunFailed,
    RunStats,
    RunTimeout,
    Scores,
)
from rankmill.jobs.runtime.settings import load_settings
from rankmill.testing import FakeAsyncClient, FakeClient, FakeWorkers, fake_workers
from tests.conftest import Server
from tests.harness.documents import ROOT, blocks
from tests.harness.models.tiny import make_bert

__all__ = ["fake_workers"]

PAIRS = [(f"query {row}", f"passage {row % 7}") for row in range(50)]

pytestmark = pytest.mark.own_precision


class Blocking:
    """A client or a run of asyncio whose calls wait, so that one test can be that of both."""

    def __init__(self, asked: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._asked, self._loop = asked, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._asked, name)
        if name == "progress":
            return self._loop.run_until_complete(found())
        if not inspect.iscoroutinefunction(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            answer = self._loop.run_until_complete(found(*args, **options))
            return Blocking(answer, self._loop) if type(answer).__module__.startswith("rankmill") and hasattr(
                answer, "cancel") else answer  # fmt: skip

        return call

    def __iter__(self) -> Iterator[Any]:
        scores = aiter(self._asked)
        while (score := self._loop.run_until_complete(anext(scores, None))) is not None:
            yield score


Make = Callable[..., Any]


class Side:
    """Clients of one kind, of workers that score and of none."""

    def __init__(self, kind: str, make: Make, away: Make) -> None:
        self.kind, self.make, self.away = kind, make, away
        self.is_fake = kind.startswith("fake")


@pytest.fixture(params=["fake", "fake asyncio", "real", "real asyncio"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    """The clients of either side, each with a chunk size and a window that make several chunks."""
    is_async = request.param.endswith("asyncio")
    usual: dict[str, Any] = {"precision": "fp32", "chunk_size": 16, "window": 3}
    clients: list[Any] = []
    loop = asyncio.new_event_loop()
    workers, nobody = FakeWorkers(), FakeWorkers(count=0)

    def client(url: str, fakes: FakeWorkers | None, **options: Any) -> Any:
        options = {**usual, **options}
        made: Any
        if fakes:
            made = (FakeAsyncClient if is_async else FakeClient)(fake_workers=fakes, **options)
        else:
            made = (AsyncClient if is_async else Client)(url, **options)
        clients.append(Blocking(made, loop) if is_async else made)
        return clients[-1]

    if request.param.startswith("fake"):
        yield Side(
            request.param, lambda **options: client("", workers, **{"model": "m", **options}),
            lambda **options: client("", nobody, model="m", queue="nobody", **options),
        )  # fmt: skip
    else:
        server: Server = request.getfixturevalue("shared_queue")
        model = str(request.getfixturevalue("tiny_model"))
        yield Side(
            request.param, lambda **options: client(server.url, None, **{"model": model, **options}),
            lambda **options: client(server.url, None, model=model, queue="nobody", **options),
        )  # fmt: skip
    for each in clients:
        each.close()
    loop.close()


def test_scores_are_an_array_in_order_with_the_reasons_of_rows_without_one(side: Side) -> None:
    client = side.make()
    scores = client.score([*PAIRS, (None, "p"), ("q", None)], timeout=60)
    assert type(scores) is Scores
    assert scores.shape == (52,)
    assert scores.dtype == np.float32
    assert np.flatnonzero(np.isnan(scores)).tolist() == [50, 51]
    assert scores.errors == {50: "query is null", 51: "passage is null"}
    again = client.score(PAIRS[::-1], timeout=60)
    np.testing.assert_allclose(again[::-1], scores[:50], atol=1e-5)
    assert client.score([], timeout=60).shape == (0,)


def test_tables_of_several_kinds_are_taken(side: Side) -> None:
    client = side.make()
    columns = {"q": [query for query, _ in PAIRS], "p": [passage for _, passage in PAIRS]}
    expected = client.score(PAIRS, timeout=60)
    for pairs in (pd.DataFrame(columns), pa.table(columns), pa.Table.from_pydict(columns).to_reader()):
        np.testing.assert_allclose(client.score(pairs, columns=("q", "p"), timeout=60), expected, atol=1e-5)


def test_several_models_score_pairs_that_are_read_once(side: Side, request: pytest.FixtureRequest) -> None:
    models = ["m", "n"] if side.is_fake else [str(request.getfixturevalue("tiny_model"))]
    client = side.make()
    scores = client.score_models(iter(PAIRS), models, timeout=60)
    assert list(scores) == models
    for each in scores.values():
        np.testing.assert_allclose(each, client.score(PAIRS, timeout=60), atol=1e-5)


def test_the_setting_revision_is_only_for_the_model_of_the_settings() -> None:
    workers = FakeWorkers()
    client = FakeClient(fake_workers=workers, model="m", revision="own")
    client.score(PAIRS)
    client.score(PAIRS, model="m")
    client.score(PAIRS, model="n")
    client.score(PAIRS, model="n", revision="its")
    client.submit(PAIRS, model="n", detached=True)
    asked = [(run.asked.spec.model, run.asked.spec.revision) for run in workers.runs]
    assert asked == [("m", "own"), ("m", "own"), ("n", None), ("n", "its"), ("n", None)]


def test_a_revision_is_that_of_the_first_of_several_models() -> None:
    workers = FakeWorkers()
    FakeClient(fake_workers=workers, revision="other").score_models(PAIRS, ["m", "n"], revision="mine")
    asked = [run.asked.spec for run in workers.runs]
    assert [(spec.model, spec.revision) for spec in asked] == [("m", "mine"), ("n", None)]
    FakeClient(fake_workers=workers, model="n", revision="own").score_models(PAIRS, ["m", "n"])
    asked = [run.asked.spec for run in workers.runs[2:]]
    assert [(spec.model, spec.revision) for spec in asked] == [("m", None), ("n", "own")]


def test_the_best_passages_come_first(side: Side) -> None:
    client = side.make()
    passages: Any = ["the moon", None, "cheese", "a moon of cheese"]
    ranked = client.rank("how far is the moon", passages, timeout=60)
    assert all(type(each) is Ranked for each in ranked)
    assert sorted(each.index for each in ranked) == [0, 1, 2, 3]
    assert (ranked[-1].index, ranked[-1].error) == (1, "passage is null")
    assert ranked[0].score >= ranked[1].score >= ranked[2].score
    assert [each.index for each in client.rank("how far is the moon", passages, top_k=2)] == [
        each.index for each in ranked[:2]
    ]


def test_a_run_is_iterated_and_says_how_far_it_is(side: Side) -> None:
    client = side.make()
    run = client.submit([*PAIRS, (None, "p")])
    assert run.progress.rows >= 0
    scores = list(run)
    assert len(scores) == 51
    assert np.isnan(scores[50])
    assert run.errors == {50: "query is null"}
    assert (run.progress.rows, run.progress.row_errors) == (51, 1)
    stats = run.stats
    assert type(stats) is RunStats
    assert (stats.rows, stats.chunks, stats.retries, stats.precision) == (51, 4, 0, "fp32")
    assert sum(stats.workers.values()) == 51
    assert stats.tokens > 51
    np.testing.assert_allclose(client.submit(PAIRS).scores(60), scores[:50], atol=1e-5)
    assert client.submit(PAIRS).wait(60).rows == 50


def test_an_endless_input_is_read_until_the_run_is_cancelled(side: Side) -> None:
    client = side.make()
    run = client.submit((f"cat {number}", "the moon") for number in itertools.count())
    assert np.isfinite(list(itertools.islice(run, 40))).all()
    run.cancel()
    with pytest.raises(RunCancelled, match=f"^run {run.id} was cancelled$"):
        run.scores(5)


def test_options_change_how_a_run_is_scored(side: Side) -> None:
    client = side.make()
    logits = client.score(PAIRS, activation="identity", timeout=60)
    np.testing.assert_allclose(
        client.score(PAIRS, activation="sigmoid", timeout=60), 1 / (1 + np.exp(-logits)), atol=1e-5
    )
    with pytest.raises(RunFailed, match=r"activation softmax is for several outputs, and model .* has one"):
        client.score(PAIRS, activation="softmax", timeout=60)
    with pytest.raises(RunFailed, match=r"model .* has no output 'nonsense'; it has 0: LABEL_0"):
        client.score(PAIRS, label="nonsense", timeout=60)


def test_a_time_that_is_over_ends_the_wait_and_the_run_goes_on(side: Side) -> None:
    client = side.away(no_workers_seconds=None)
    run = client.submit(PAIRS)
    for _ in range(2):
        with pytest.raises(RunTimeout, match=r"^run .*: 0 rows were done when .* over; the run goes on"):
            run.scores(timeout=0.1)
    run.cancel()
    with pytest.raises(RunTimeout, match=r"the run is cancelled$"):
        client.score(PAIRS, timeout=0.1)
    with pytest.raises(TimeoutError):
        client.rank("q", ["p"], timeout=0.1)


def test_workers_that_are_not_there_are_missed(side: Side) -> None:
    client = side.away(no_workers_seconds=0.5)
    run = client.submit(PAIRS)
    with pytest.raises(NoWorkers, match=r"^no worker listens on queue 'nobody'.*; the run goes on"):
        run.scores(timeout=60)
    run.cancel()


def test_a_detached_run_is_attached_to_by_its_id_as_often_as_one_likes(side: Side) -> None:
    run_id = side.make().submit([*PAIRS, (None, "p")], detached=True).id
    expected = side.make().score(PAIRS, timeout=60)
    for _ in range(2):
        run = side.make().attach(run_id)
        np.testing.assert_allclose(run.scores(60)[:50], expected, atol=1e-5)
        assert run.errors == {50: "query is null"}
        assert run.progress.rows == 51
    side.make().attach(run_id).cancel()
    for each in (run_id, "nonsense"):
        with pytest.raises(RunExpired, match=f"^there are no results of run {each}"):
            side.make().attach(each)
    with pytest.raises(InputError, match=r"^there are no pairs to score$"):
        side.make().submit([], detached=True)


def test_who_waits_for_a_detached_run_learns_that_another_has_cancelled_it(side: Side) -> None:
    run = side.away().submit(PAIRS, detached=True)
    side.away().attach(run.id).cancel()
    with pytest.raises(RunCancelled):
        run.scores(10)


def test_wrong_calls_are_refused_in_a_line(side: Side) -> None:
    client = side.away()
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (InputError, "pair 1 is 'ab', not a query", lambda: client.submit([("q", "p"), "ab"])),
        (InputError, "pairs are int, which cannot be read", lambda: client.score(7)),
        (InputError, "give one of pairs, texts and messages, not 0", client.score),
        (InputError, "passages are one string", lambda: client.rank("q", "abc")),
        (InputError, "nothere", lambda: client.score(pa.table({"a": ["x"]}), columns=("nothere", "a"))),
        (ConfigError, "top_k is 0", lambda: client.rank("q", ["p"], top_k=0)),
        (ConfigError, "modle: .* the nearest is model", lambda: client.score(PAIRS, modle="m")),
        (ConfigError, "priority: 'x' does not exist", lambda: client.submit(PAIRS, priority="x")),
        (ConfigError, "max_length: ", lambda: client.submit(PAIRS, max_length=1)),
        (ConfigError, r"quue: .* is queue \(set in the options given\)", lambda: side.make(quue="q")),
        (
            ConfigError,
            "queue: settings are given too; put",
            lambda: side.make(settings=load_settings(), queue="q"),
        ),
        (ConfigError, "names several; name one queue for a run", lambda: side.make(queue="a,b")),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()


def test_files_are_submitted_and_wait_for_a_runner(side: Side) -> None:
    client = side.away(file_queue="nobody-runs")
    run = client.submit_file("in.csv", "out.csv", top_k=3)
    assert run.status().state == "waiting"
    request = run.status().order.request
    assert (request.top_k, request.inputs, request.output) == (
        3, (str(Path("in.csv").absolute()),), str(Path("out.csv").absolute()),
    )  # fmt: skip
    assert side.away(file_queue="nobody-runs").attach(run.id).id == run.id
    with pytest.raises(RunTimeout, match=f"submitted run {run.id} has not ended; it goes on"):
        run.wait(timeout=0.01)
    assert run.cancel().state == "cancelled"
    with pytest.raises(RunCancelled):
        run.wait(timeout=1)
    with pytest.raises(ConfigError, match=r"topk: .* is top_k"):
        client.submit_file("a.csv", "b.csv", topk=3)
    with pytest.raises(InputError, match=r"standard input \(-\) cannot be submitted"):
        client.submit_file("-", "b.csv")


@pytest.fixture(scope="module")
def labelled_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("labels"), labels=2)


def test_labels_of_texts(side: Side, request: pytest.FixtureRequest) -> None:
    if side.is_fake:
        client: Any = FakeClient(fake_workers=FakeWorkers(labels=["LABEL_0", "LABEL_1"]), chunk_size=16)
    else:
        client = side.make(model=str(request.getfixturevalue("labelled_model")))
    texts = [f"text {row}" for row in range(20)]
    found = client.classify(texts, timeout=60)
    assert {each.label for each in found} <= {"LABEL_0", "LABEL_1"}
    assert [sum(each.probabilities.values()) for each in found] == pytest.approx([1.0] * 20, abs=1e-5)
    every = client.score(texts=texts, all_labels=True, timeout=60)
    assert (every.shape, every.labels) == ((20, 2), ("LABEL_0", "LABEL_1"))
    np.testing.assert_allclose(client.score(texts=texts, label="LABEL_1", timeout=60), every[:, 1], atol=1e-5)
    with pytest.raises(RunFailed, match=r"model .* has 2 outputs; name the one to score by"):
        client.score(texts=texts, timeout=60)
    alone = side.make().score(PAIRS[:3], all_labels=True, timeout=60)
    assert (alone.shape, alone.labels) == ((3,), ())


# What only fake workers can do


def test_workers_may_be_late_fail_and_come_back() -> None:
    workers = FakeWorkers(lambda query, passage: float(len(passage)), seconds=60)
    client = FakeClient(fake_workers=workers)
    run = client.submit([("q", "four")])
    with pytest.raises(RunTimeout):
        run.scores(timeout=0.01)
    workers.seconds = 0
    assert run.scores(timeout=5).tolist() == [4.0]
    workers.score = lambda query, passage: "it is empty" if not passage else float("nan")
    scores = client.score([("q", ""), ("q", "p")])
    assert scores.errors == {0: "it is empty", 1: "the model's output is not a number in fp32"}

    def fails(query: str, passage: str) -> float:
        raise RunFailed("cannot get model m")

    workers.score = fails
    with pytest.raises(RunFailed, match=r"^cannot get model m$"):
        client.score(PAIRS)
    assert [run.is_complete for run in workers.runs] == [True, True, False]
    assert [run.is_cancelled for run in workers.runs] == [False, False, True]


def test_a_mistake_in_the_function_that_scores_is_seen() -> None:
    with pytest.raises(ZeroDivisionError):
        FakeClient(fake_workers=FakeWorkers(lambda query, passage: 1 / 0)).score(PAIRS, timeout=5)
    for answer in (None, [1.0, 2.0]):
        workers = FakeWorkers(lambda query, passage, answer=answer: answer)
        with pytest.raises(ConfigError, match=r"^score: it returns .*, and not a number or a text$"):
            FakeClient(fake_workers=workers).score(PAIRS, timeout=5)
    several = FakeClient(fake_workers=FakeWorkers(lambda text: 1.0, labels=["a", "b"]))
    with pytest.raises(ConfigError, match=r"^score: it returns 1.0, and not 2 numbers or a text$"):
        several.classify(["x"], timeout=5)


def test_an_embedded_fake_starts_nothing() -> None:
    assert FakeClient.embedded(model="m", workers=2).score(PAIRS[:1], timeout=5).shape == (1,)


def test_the_clients_of_a_service_are_fake_within_the_fixture(fake_workers: FakeWorkers) -> None:
    fake_workers.score = lambda query, passage: float(len(passage))
    with Client(model="m") as client, Client.embedded(model="m") as alone, CrossEncoder("m") as model:
        for each in (client, alone):
            assert each.score([("q", "abc")]).tolist() == [3.0]
        assert model.predict([("q", "ab"), ("q", "abcd")]).tolist() == [2.0, 4.0]

    async def service() -> Scores:
        async with AsyncClient(model="m", tenant="t") as client:
            return await client.score([("q", "abc")])

    assert asyncio.run(service()).tolist() == [3.0]
    assert [run.asked.spec.model for run in fake_workers.runs] == ["m"] * 4


def test_after_the_fixture_clients_are_real_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    with FakeWorkers().everywhere():
        Client()
    with pytest.raises(ConfigError, match="no Redis server is named"):
        Client()


def test_submitted_files_end_as_the_test_says() -> None:
    workers = FakeWorkers()
    client = FakeClient(fake_workers=workers)
    done, failed = (client.submit_file("a.csv", f"{name}.csv") for name in ("done", "failed"))
    workers.end_file(done.id, rows=3)
    workers.end_file(failed.id, "the input is not there")
    outcome = done.wait(timeout=1).outcome
    assert outcome
    assert (outcome.rows, outcome.output[-8:]) == (3, "done.csv")
    with pytest.raises(RunFailed, match="the input is not there"):
        failed.wait(timeout=1)


def test_a_service_is_tested_as_the_guide_shows(tmp_path: Path) -> None:
    """In a process of its own, with the fixture from the test's module, and as a plugin."""
    (block,) = [each for each in blocks(ROOT / "docs/guides/python.md") if "fake_workers" in each.text]
    (tmp_path / "service.py").write_text(
        "from rankmill import Client, RunTimeout\n"
        "def best(query, passages):\n"
        "    try:\n"
        "        return Client().rank(query, passages, timeout=0.1 if len(passages) == 1 else 60)[0].index\n"
        "    except RunTimeout:\n"
        "        return 'later'\n"
    )
    imported, _, tests = block.text.partition("\n")
    (tmp_path / "test_one.py").write_text(f"import service\n{imported}\n{tests}")
    (tmp_path / "test_two.py").write_text(f"import service\n{tests}")
    (tmp_path / "conftest.py").write_text(f"{imported.partition(': ')[2]}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("REDIS_URL", None)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_it_needs_neither_torch_nor_a_server_nor_pytest_and_begins_at_once() -> None:
    code = (
        "import sys, time, rankmill.testing as testing; began = time.perf_counter(); "
        "testing.FakeClient().score([('q', 'p')]); "
        "print(time.perf_counter() - began, {'torch', 'transformers', 'pytest', 'fastapi'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, rest = done.stdout.strip().split(" ", 1)
    assert rest == "set()"
    assert float(seconds) < 2  # it is 0.01 s; a busy machine is no failure


def test_a_wait_of_one_task_leaves_the_others_their_time() -> None:
    workers, others = FakeWorkers(seconds=3600), FakeWorkers()

    async def main() -> None:
        async with (
            FakeAsyncClient(fake_workers=workers) as client,
            FakeAsyncClient(fake_workers=others) as other,
        ):
            waits = asyncio.create_task(client.score(PAIRS))
            while not workers.runs:
                await asyncio.sleep(0)
            assert len(await other.score(PAIRS, timeout=60)) == 50
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
        assert workers.runs[0].is_cancelled

    asyncio.run(main())
