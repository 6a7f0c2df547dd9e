"""Memory before it is gone: batches that would not fit are cut before they run."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits, OutOfMemory
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.batch_size import BatchSize, BudgetSearch
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.headroom import Headroom, HostMemory
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.work import prepare
from rankmill.workers.models.loading import Model, load_model

TOKEN = 1000
"""Bytes that a forward of `Hungry` needs for each padded token."""


class Hungry:
    """A backend with so many bytes of memory, of which others may use some; notes its batches."""

    name, device, precision, bytes, pieces = "hungry", "cpu", "fp32", 0, 1

    def __init__(self, size: int, depth: int = 1) -> None:
        self.size, self.depth, self.shares_prefixes, self.packs = size, depth, False, False
        self.others = self.taken = self.most = 0
        self.batches: list[int] = []
        self.failures = 0

    def submit(self, batch: Batch) -> HungryForward:
        self.batches.append(len(batch.ids))
        return HungryForward(self, batch)

    def take(self, count: int) -> None:
        if self.taken + self.others + count > self.size:
            self.failures += 1
            raise OutOfMemory("no memory is left")
        self.taken += count
        self.most = max(self.most, self.taken)

    def used(self) -> int:
        return self.taken

    def free(self) -> int:
        return self.size - self.taken - self.others

    def peak(self) -> int:
        return self.most

    def begin(self) -> None:
        self.most = self.taken


class HungryForward:
    def __init__(self, backend: Hungry, batch: Batch) -> None:
        self._backend, self._rows, self._bytes = backend, len(batch.ids), TOKEN * batch.ids.size
        backend.take(self._bytes)

    def result(self) -> Logits:
        self._backend.taken -= self._bytes
        return np.zeros(self._rows, np.float32)


@pytest.fixture
def model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr("rankmill.workers.engine.headroom._KEPT_SECONDS", 0)
    return load_model(ScoreSpec(model=str(tiny_model), precision="fp32"), "cpu")


def engine_with(model: Model, backend: Hungry, budget: int, search: BudgetSearch | None = None) -> Engine:
    object.__setattr__(model, "backend", backend)
    return Engine(model, BatchSize(budget, headroom=Headroom(backend), search=search))


def score(engine: Engine, rows: int) -> None:
    work = prepare(engine.model, ["a query"] * rows, ["a cat"] * rows)
    pipeline = Pipeline(0.0).start()
    pipeline.put(engine, work, lambda: None)
    pipeline.close(finish=True)
    assert not work.scored.errors
    assert np.isfinite(work.scored.scores).all()


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_that_would_not_fit_are_cut(
    depth: int, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    length = int(prepare(model, ["a query"], ["a cat"]).tokens.lengths[0])
    rows = 1024 // length
    backend = Hungry(size=10_000 * TOKEN, depth=depth)
    engine = engine_with(model, backend, budget=4096)
    score(engine, rows)  # learns what a batch needs
    assert backend.batches == [rows]
    backend.others = 8_000 * TOKEN
    with caplog.at_level(logging.WARNING):
        score(engine, 4 * rows)
    assert backend.failures == 0
    assert max(backend.batches) * length <= 2_000
    assert engine.size.token_budget == 4096  # memory may be free again later
    assert caplog.text.count("MiB of memory are free: cut a batch of") == 1
    backend.others = 0
    backend.batches.clear()
    score(engine, 4 * rows)
    assert max(backend.batches) * length > 2_000


def test_a_row_that_seems_too_large_may_try(model: Model) -> None:
    backend = Hungry(size=10_000 * TOKEN)
    engine = engine_with(model, backend, budget=4096)
    score(engine, 100)
    backend.others = backend.size - 50 * TOKEN
    score(engine, 20)
    assert backend.failures == 0
    assert set(backend.batches[1:]) == {min(backend.batches[1:])}


def test_the_search_tries_no_budget_that_would_not_fit(model: Model, tmp_path: Path) -> None:
    backend = Hungry(size=3000 * TOKEN)
    search = BudgetSearch(backend, "hungry", 1024, tmp_path, worth=0.0)
    score(engine_with(model, backend, budget=1024, search=search), 300)
    assert len(backend.batches) > 4
    assert backend.failures == 0


def test_the_memory_of_this_process_is_measured() -> None:
    memory = HostMemory()
    memory.begin()
    before = memory.used()
    with mmap.mmap(-1, 200 << 20) as block:  # an allocator may keep what is freed
        for place in range(0, len(block), mmap.PAGESIZE):
            block[place] = 1
        assert memory.used() - before > 100 << 20
    assert memory.peak() - before > 100 << 20
    memory.begin()
    assert memory.peak() - before < 100 << 20
    assert memory.used() > 0
    assert memory.free() > 0


LIMITED = """
import resource, sys
import numpy as np, psutil
from tests.workers.engine.test_headroom import *

class Allocating(Hungry):
    def submit(self, batch):
        self.batches.append(len(batch.ids))
        try:
            block = np.ones((batch.ids.size, 50_000), np.uint8)  # bytes for each token
        except MemoryError as error:
            self.failures += 1
            raise OutOfMemory(str(error)) from error
        return Done(len(batch.ids))

class Done:
    def __init__(self, rows):
        self.rows = rows
    def result(self):
        return np.zeros(self.rows, np.float32)

def failures(headroom):
    backend = Allocating(0)
    object.__setattr__(model, "backend", backend)
    engine = Engine(model, BatchSize(16384, headroom=headroom))
    score(engine, 50)
    limit = psutil.Process().memory_info().vms + (300 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    score(engine, 2000)
    return backend.failures

model = load_model(ScoreSpec(model=sys.argv[1], precision="fp32"), "cpu")
print(failures(Headroom(HostMemory())), failures(Headroom()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_a_real_limit_of_a_real_process(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny_model)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with_headroom, without = map(int, done.stdout.split())
    assert with_headroom == 0
    assert without > 0  # the limit is one
