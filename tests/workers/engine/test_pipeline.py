"""What is put into the pipeline is answered once, soon, and fairly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.system import system
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.torch.backend import TorchForward
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.batch_size import BatchSize
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.work import Work, prepare
from rankmill.workers.models.loading import load_model
from tests.conftest import run_command, wait_for

pytestmark = pytest.mark.usefixtures("interleaved")


class Paced:
    """A backend that takes `seconds` for each batch, and notes the sizes of its batches.

    While ``go`` is cleared, the batch in progress does not end.
    """

    name, device, precision, depth = "paced", "cpu", "fp32", 1
    packs = shares_prefixes = False
    pieces = 1

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def submit(self, batch: Batch) -> TorchForward:
        self.sizes.append(len(batch.ids))
        self.go.wait()
        time.sleep(self.seconds)
        return TorchForward(torch.zeros(len(batch.ids)), None)


def paced(
    model: Path, seconds: float, rows_in_batch: int, *, short_batches: bool = False
) -> tuple[Engine, Paced, Callable[[int], Work]]:
    loaded = load_model(ScoreSpec(model=str(model), precision="fp32"), "cpu")
    engine = Engine(loaded, BatchSize(5 * rows_in_batch, short_batches=short_batches))
    backend = Paced(seconds)
    object.__setattr__(engine.model, "backend", backend)
    five_tokens = ["q"], ["cat"]
    return engine, backend, lambda rows: prepare(engine.model, *(texts * rows for texts in five_tokens))


def test_a_request_does_not_wait_for_what_was_claimed_before_it(tiny_model: Path) -> None:
    engine, backend, work = paced(tiny_model, 0.0, rows_in_batch=20)
    backend.go.clear()
    pipeline = Pipeline(0.0).start()
    large, request = [work(100) for _ in range(4)], work(15)
    finished: list[str] = []
    for number, each in enumerate(large):
        pipeline.put(engine, each, lambda number=number: finished.append(f"large {number}"))  # type: ignore[misc]
    wait_for(lambda: backend.sizes)
    pipeline.put(engine, request, lambda: finished.append("request"), "request")
    backend.go.set()
    pipeline.close(finish=True)
    assert backend.sizes.index(15) == 1  # only the batch in progress was before it
    assert finished[0] == "request"
    assert [name for name in finished if name != "request"] == [f"large {number}" for number in range(4)]


def test_requests_do_not_keep_bulk_work_from_its_turn(tiny_model: Path) -> None:
    engine, _, work = paced(tiny_model, 0.005, rows_in_batch=50)
    pipeline = Pipeline(0.0).start()
    large = threading.Event()
    pipeline.put(engine, work(512), large.set)
    deadline = time.monotonic() + 100
    while not large.is_set():
        assert time.monotonic() < deadline
        pipeline.put(engine, work(50), lambda: None, "request")
        pipeline.wait_for(lambda: pipeline.pending < 1000, 1)
    pipeline.close(finish=False)


def test_requests_that_come_together_share_batches(tiny_model: Path) -> None:
    engine, backend, work = paced(tiny_model, 0.001, rows_in_batch=200)
    pipeline = Pipeline(1.0).start()
    done = threading.Semaphore(0)
    for _ in range(50):
        pipeline.put(engine, work(20), done.release)
    for _ in range(50):
        assert done.acquire(timeout=60)
    assert len(backend.sizes) <= 10
    assert sum(backend.sizes) == 1000
    pipeline.close(finish=True)


def test_batches_are_small_until_the_speed_is_known(tiny_model: Path) -> None:
    engine, backend, work = paced(tiny_model, 0.0, rows_in_batch=40, short_batches=True)
    pipeline = Pipeline(0.0)
    for rows in (30, 120):
        pipeline.put(engine, work(rows), lambda: None)
        pipeline.wait_until_idle(0)
    assert backend.sizes == [10, 10, 10, 40, 40, 40]


def test_scores_of_shared_batches_are_those_of_each_alone(tiny_model: Path) -> None:
    engine = Engine(load_model(ScoreSpec(model=str(tiny_model), precision="fp32"), "cpu"), 512)
    pairs = [
        [("q " * (1 + n % 5), "a cat " * (1 + (n * m) % 17)) for n in range(m, m + 30)] for m in range(8)
    ]
    works = [prepare(engine.model, *(list(texts) for texts in zip(*some, strict=True))) for some in pairs]
    pipeline = Pipeline(0.05).start()
    for work in works:
        pipeline.put(engine, work, lambda: None)
    pipeline.close(finish=True)
    for work, some in zip(works, pairs, strict=True):
        alone = engine.score(*(list(texts) for texts in zip(*some, strict=True)))
        np.testing.assert_allclose(work.scored.scores, alone.scores, atol=1e-5)
        assert work.scored.tokens == alone.tokens


def test_room_is_what_is_pending(tiny_model: Path) -> None:
    engine, backend, work = paced(tiny_model, 0.0, rows_in_batch=100)
    backend.go.clear()
    pipeline = Pipeline(0.0).start()
    pipeline.put(engine, work(300), lambda: None)
    assert not pipeline.wait_for(lambda: pipeline.pending < 100, 0.01)
    backend.go.set()
    assert pipeline.wait_for(lambda: pipeline.pending < 250, 60)
    assert pipeline.wait_until_idle(60)
    pipeline.close(finish=False)


def test_what_is_dropped_is_answered_after_the_batch_in_progress(tiny_model: Path) -> None:
    engine, backend, work = paced(tiny_model, 0.0, rows_in_batch=10)
    backend.go.clear()
    pipeline = Pipeline(0.0).start()
    dropped, kept = work(512), work(30)
    answers: list[str] = []
    pipeline.put(engine, dropped, lambda: answers.append("dropped"))
    pipeline.put(engine, kept, lambda: answers.append("kept"))
    wait_for(lambda: backend.sizes)
    for _ in range(2):
        pipeline.drop(dropped, lambda: answers.append("given up"))
    backend.go.set()
    assert pipeline.wait_until_idle(60)
    assert sorted(answers) == ["given up", "kept"]
    assert sum(backend.sizes) < 50
    assert np.isfinite(kept.scored.scores).all()
    pipeline.close(finish=True)


@pytest.mark.parametrize("where", ["forward", "answer"])
def test_what_cannot_go_on_ends_the_process(where: str, tiny_model: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from tests.workers.engine.test_pipeline import paced
from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.engine.pipeline import Pipeline
engine, backend, work = paced(Path({str(tiny_model)!r}), 0.0, 10)
def lose(*_):
    raise DeviceLost("gone")
if {where!r} == "forward":
    backend.submit = lose
Pipeline(0.0).start().put(engine, work(5), lose)
time.sleep(30)
"""
    done = run_command("python", "-c", script)
    assert done.code == 1
    assert "the worker ends after an error of its device (gone); other workers do its work" in done.err
    assert "Traceback" not in done.err


def test_bulk_work_that_is_not_begun_can_be_withdrawn(tiny_model: Path) -> None:
    engine, backend, work = paced(tiny_model, 0.0, rows_in_batch=10)
    backend.go.clear()
    pipeline = Pipeline(0.0).start()
    answers: list[str] = []
    works = {name: work(100) for name in ("first", "second", "third")}
    for name, each in works.items():
        pipeline.put(engine, each, lambda name=name: answers.append(name), whole=True)  # type: ignore[misc]
    wait_for(lambda: works["first"] not in pipeline.unstarted())
    assert works["third"] in pipeline.unstarted()
    assert pipeline.withdraw(works["third"])
    assert not pipeline.withdraw(works["third"])
    assert not pipeline.withdraw(works["first"])
    backend.go.set()
    pipeline.close(finish=True)
    assert answers == ["first", "second"]
    assert pipeline.pending == 0


def test_a_worker_whose_only_chunk_is_given_away_scores_the_next_one(tiny_model: Path) -> None:
    engine, _, work = paced(tiny_model, 0.0, rows_in_batch=10)
    pipeline = Pipeline(1.5).start()
    answers: list[str] = []
    given, kept = work(5), work(5)
    pipeline.put(engine, given, lambda: answers.append("given"), whole=True)
    time.sleep(0.1)
    assert pipeline.withdraw(given)  # while the forward waits for a full batch
    time.sleep(1.6)
    pipeline.put(engine, kept, lambda: answers.append("kept"))
    assert pipeline.wait_until_idle(60)
    assert answers == ["kept"]
    pipeline.close(finish=True)


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_are_answered_one_after_the_other(
    packed: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr("rankmill.workers.engine.batch_size._MIXED_SECONDS", 0.0)  # the fewest batches
    engine, backend, work = paced(tiny_model, 0.002, rows_in_batch=10)
    backend.packs = packed
    pipeline = Pipeline(0.0).start()
    pipeline.put(engine, work(30), lambda: None)
    assert pipeline.wait_until_idle(60)
    before = sum(backend.sizes)
    answers: list[tuple[int, int]] = []
    for number in range(30):
        answer = partial(lambda number: answers.append((number, sum(backend.sizes) - before)), number)
        pipeline.put(engine, work(100), answer)
    assert pipeline.wait_until_idle(60)
    numbers, scored = zip(*answers, strict=True)
    assert sorted(numbers) == list(range(30))
    assert scored[9] < 2000  # all at the end without it
    pipeline.close(finish=True)


class Ahead(Paced):
    """A device that takes forwards ahead, and notes how many are in progress when one begins."""

    depth = 3

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.in_progress: list[int] = []
        self.open = 0

    def submit(self, batch: Batch) -> _Forward:  # type: ignore[override]
        self.sizes.append(len(batch.ids))
        self.in_progress.append(self.open)
        self.open += 1
        return _Forward(self, len(batch.ids))


class _Forward:
    def __init__(self, device: Ahead, rows: int) -> None:
        self._device, self._rows = device, rows

    def result(self) -> Logits:
        self._device.go.wait()
        self._device.open -= 1
        return np.zeros(self._rows, np.float32)


def test_while_requests_come_one_forward_is_in_progress(tiny_model: Path) -> None:
    engine, _, work = paced(tiny_model, 0.0, rows_in_batch=20)
    device = Ahead(0.0)
    device.go.clear()
    object.__setattr__(engine.model, "backend", device)
    pipeline = Pipeline(0.0).start()
    pipeline.put(engine, work(400), lambda: None)
    wait_for(lambda: device.in_progress == [0, 1, 2])
    pipeline.put(engine, work(15), lambda: None, "request")
    device.go.set()
    pipeline.close(finish=True)
    after = device.in_progress[device.sizes.index(15) :]
    assert len(after) > 3
    assert not any(after[1:])


def test_a_proof_is_not_taken_for_a_slow_batch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that hangs later is found after five minutes, not after a hundred times the proof's."""
    now = [0.0]
    monkeypatch.setattr(system, "monotonic", lambda: now[0])

    def prove() -> SimpleNamespace:
        now[0] += 60
        return SimpleNamespace(holds=True)

    engine, _, work = paced(tiny_model, 0.0, rows_in_batch=20)
    object.__setattr__(engine.model, "prove_again", prove)
    now[0] += 4000
    pipeline = Pipeline(0.0)
    first = work(20)
    pipeline.put(engine, first, lambda: None)
    pipeline.drain()
    assert now[0] == 4060
    assert first.seconds["device"] == 0
    pipeline.put(engine, work(20), lambda: None)
    pipeline.step()
    assert not pipeline.wedged()
    now[0] += 301
    assert pipeline.wedged()
