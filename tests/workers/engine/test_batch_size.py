"""The token budget that a worker finds: the fastest that fits, looked for once, and kept."""

from __future__ import annotations

import json
import logging
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import OutOfMemory
from rankmill.workers.backends.torch.backend import TorchForward
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.batch_size import BatchSize, BudgetSearch
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.work import prepare
from rankmill.workers.models.loading import load_model


class Costing:
    """A backend whose batches cost seconds, and more for the square of their tokens; it holds so many."""

    now = 0.0
    """The time (s), which only batches spend."""
    name, device, precision, depth, bytes = "costing", "cpu", "fp32", 2, 0
    shares_prefixes = False
    packs = False
    pieces = 1

    def __init__(self, batch: float, square: float, memory: int = 10**9) -> None:
        self.batch, self.square, self.memory = batch, square, memory

    def submit(self, batch: Batch) -> TorchForward:
        if batch.ids.size > self.memory:
            raise OutOfMemory("too large")
        Costing.now += self.batch + self.square * batch.ids.size**2
        return TorchForward(torch.zeros(len(batch.ids)), None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are measured in the time that batches say they cost, however busy the machine is."""
    monkeypatch.setattr(
        "rankmill.workers.engine.batch_size.time",
        SimpleNamespace(perf_counter=lambda: Costing.now, monotonic=time.monotonic),
    )


BATCH = Batch.padded(*(np.ones((2, 8), dtype=np.int64) for _ in range(3)))


def search_of(backend: Costing, folder: Path, model: str = "some/model") -> BudgetSearch:
    search = BudgetSearch(backend, model, 64, folder, worth=0.0)
    assert search.see(rows=200, tokens=1600, seconds=1.0)
    return search


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (Costing(batch=0.01, square=0.0), 256),  # the more the better
        (Costing(batch=0.0, square=3e-6), 32),  # the less the better
        (Costing(batch=0.01, square=0.0, memory=128), 128),  # the most that fits
    ],
)
def test_the_best_budget_wins(tmp_path: Path, backend: Costing, expected: int) -> None:
    assert search_of(backend, tmp_path).find(BATCH) == expected


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("memory", "expected"), [(10**9, 512), (300, 256)])
def test_on_a_gpu_it_goes_up_while_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, expected: int
) -> None:
    """To what takes half a second, or to what the memory holds."""
    monkeypatch.setattr("rankmill.workers.engine.batch_size.device_name", lambda device: "a GPU")
    gpu = Costing(batch=0.01, square=0.0, memory=memory)
    gpu.device = "cuda"
    monkeypatch.setattr("rankmill.workers.engine.batch_size.empty_cache", lambda device: None)
    search = BudgetSearch(gpu, "some/model", 64, tmp_path, worth=0.0)
    assert search.see(rows=200, tokens=1600, seconds=1.1)
    assert search.find(BATCH) == expected


class Failing(Costing):
    """A backend that fails with more than so many tokens, and not for lack of memory as far as it knows."""

    def submit(self, batch: Batch) -> TorchForward:
        try:
            return super().submit(batch)
        except OutOfMemory:
            raise RuntimeError("Invalid buffer size: 12.00 GiB") from None


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("memory", "expected"), [(128, 128), (0, 64)])
def test_a_batch_that_fails_ends_no_worker(tmp_path: Path, memory: int, expected: int) -> None:
    """None can be computed if they are made from a row that breaks the model."""
    assert search_of(Failing(0.01, 0.0, memory), tmp_path).find(BATCH) == expected


@pytest.mark.parametrize("seconds", [0.1, 100.0])
def test_it_costs_a_fiftieth_of_what_was_scored_before_it(tmp_path: Path, seconds: float) -> None:
    """Trying all budgets takes 3,840 tokens, whether the device is fast or slow."""
    search = BudgetSearch(Costing(0.01, 0.0), "some/model", 64, tmp_path)
    assert not search.see(rows=2000, tokens=100_000, seconds=seconds)
    assert search.see(rows=2000, tokens=100_000, seconds=seconds)


class Disturbed(Costing):
    """Other work makes all batches slower, but for some of them: one of `quiet`, if there are so many."""

    def __init__(self, quiet: int, batch: float, square: float) -> None:
        super().__init__(batch, square)
        self._quiet, self._draw = quiet, random.Random(0)

    def submit(self, batch: Batch) -> TorchForward:
        if self._draw.randrange(self._quiet):
            Costing.now += self._draw.uniform(0.001, 0.01) * batch.ids.size
        return super().submit(batch)


@pytest.mark.usefixtures("clock")
def test_other_work_does_not_change_what_is_found(tmp_path: Path) -> None:
    """The medians of some rounds would be those of the other work."""
    often = Disturbed(2, batch=0.01, square=0.0)
    assert search_of(often, tmp_path).find(BATCH) == 256


@pytest.mark.usefixtures("clock")
def test_a_busy_machine_changes_no_budget_and_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = search_of(Disturbed(10**9, batch=0.0, square=0.0), tmp_path)
    with caplog.at_level(logging.INFO):
        assert search.find(BATCH) == 64
    assert "not kept, as the machine is busy" in caplog.text
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("clock")
def test_batches_of_a_slow_model_stay_short(tmp_path: Path) -> None:
    search = BudgetSearch(Costing(batch=0.01, square=0.0), "slow", 64, tmp_path, worth=0.0)
    assert search.see(rows=16, tokens=300, seconds=1.0)
    assert search.find(BATCH) == 128


def test_a_budget_that_batches_would_not_reach_is_not_looked_for(tmp_path: Path) -> None:
    """The search would keep requests waiting for a minute, and the batches would stay as they are."""
    search = BudgetSearch(Costing(batch=0.01, square=0.0), "slow", 2048, tmp_path, worth=0.0)
    size = BatchSize(2048, search=search, short_batches=True)
    assert not size.see(512, rows=4, tokens=512, seconds=1.0)
    assert size.tokens() == 512
    assert size.see(2048, rows=16, tokens=2048, seconds=0.1)  # it is faster than it seemed
    assert size.tokens() == 2048


@pytest.mark.usefixtures("clock")
def test_it_is_looked_for_once_and_kept(tmp_path: Path) -> None:
    first = search_of(Costing(0.01, 0.0), tmp_path)
    late = search_of(Costing(0.0, 3e-6), tmp_path)
    assert first.start == 64
    assert first.find(BATCH) == 256
    assert not first.see(rows=1, tokens=8, seconds=100)
    assert late.find(BATCH) == 256  # what another worker has found meanwhile
    again = BudgetSearch(Costing(0.01, 0.0), "some/model", 64, tmp_path)
    assert again.start == 256
    assert not again.see(rows=1, tokens=8, seconds=100)
    other = BudgetSearch(Costing(0.01, 0.0), "another/model", 64, tmp_path)
    assert other.start == 64
    kept = [json.loads(path.read_text()) for path in (tmp_path / "token-budgets").iterdir()]
    assert [(each["model"], each["token_budget"]) for each in kept] == [("some/model", 256)]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("content", ["", "[]", '{"token_budget": "many"}'])
def test_a_damaged_file_is_found_again(tmp_path: Path, content: str) -> None:
    search_of(Costing(0.01, 0.0), tmp_path).find(BATCH)
    (file,) = (tmp_path / "token-budgets").iterdir()
    file.write_text(content)
    again = search_of(Costing(0.01, 0.0), tmp_path)
    assert again.start == 64
    assert again.find(BATCH) == 256


@pytest.mark.usefixtures("clock")
def test_where_nothing_can_be_kept_the_budget_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token-budgets").write_text("a file, where a folder should be")
    with caplog.at_level(logging.WARNING):
        assert search_of(Costing(0.01, 0.0), tmp_path).find(BATCH) == 256
    assert "the token budget cannot be kept" in caplog.text


def test_a_worker_finds_it_between_its_batches(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rankmill.workers.engine.batch_size._STEADY", float("inf")
    )  # kept, however busy the machine is
    model = load_model(ScoreSpec(model=str(tiny_model), precision="fp32"), "cpu")
    engine = Engine(model, BatchSize(64, search=BudgetSearch(model.backend, "tiny", 64, tmp_path, worth=0.0)))
    queries, passages = ["a query"] * 300, ["the cat sat on the mat " * (1 + n % 5) for n in range(300)]
    work, again = prepare(engine.model, queries, passages), prepare(engine.model, queries, passages)
    pipeline = Pipeline(0.0).start()
    with caplog.at_level(logging.INFO):
        pipeline.put(engine, work, lambda: None)
        pipeline.wait_until_idle(60)
        pipeline.put(engine, again, lambda: None)
        pipeline.close(finish=True)
    assert caplog.text.count("token budget of tiny") == 1
    (file,) = (tmp_path / "token-budgets").iterdir()
    assert engine.size.token_budget == json.loads(file.read_text())["token_budget"]
    expected = Engine(model, 64).score(queries, passages).scores
    np.testing.assert_allclose(work.scored.scores, expected, atol=1e-5)
    np.testing.assert_allclose(again.scored.scores, expected, atol=1e-5)


def test_memory_that_was_short_is_not_asked_for_again(tiny_model: Path, tmp_path: Path) -> None:
    model = load_model(ScoreSpec(model=str(tiny_model), precision="fp32"), "cpu")
    object.__setattr__(model, "backend", Costing(0.0, 0.0, memory=32))
    engine = Engine(model, BatchSize(64, search=BudgetSearch(model.backend, "tiny", 64, tmp_path, worth=0.0)))
    work = prepare(engine.model, ["q"] * 40, ["cat"] * 40)
    pipeline = Pipeline(0.0).start()
    pipeline.put(engine, work, lambda: None)
    pipeline.close(finish=True)
    assert engine.size.token_budget <= 32
    assert not work.scored.errors
