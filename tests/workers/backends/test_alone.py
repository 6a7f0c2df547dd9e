"""Deterministic: of a pair and a model, nothing but the kind of device decides the bits of a score."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.alone import Alone
from rankmill.workers.backends.auto import backends
from rankmill.workers.backends.base import Backend, OutOfMemory
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.models.loading import Model, load_model
from tests.harness.models.backends import require
from tests.workers.backends.test_same_row import PAIRS, proven_bound, scores_of

QUERIES, PASSAGES = PAIRS
KINDS = [("torch", "fp32"), ("openvino", "fp32"), ("openvino", "bf16")]
SLOW = [("torch", "bf16"), ("onnx", "fp32"), ("openvino", "int8"), ("onnx", "int8"), ("mlx", "fp32")]


def deterministic(backend: str, precision: str) -> Model:
    spec = {"model": "demo", "precision": precision, "activation": "identity", "deterministic": True}
    return load_model(ScoreSpec.model_validate(spec), "cpu", backend)


def bits(engine: Engine, order: np.ndarray) -> np.ndarray:
    """The bits of all scores, in the examples' order, where the rows come in this order."""
    found = engine.score([QUERIES[row] for row in order], [PASSAGES[row] for row in order]).scores
    back = np.empty_like(found)
    back[order] = found
    return back.view(np.uint32)


@pytest.mark.parametrize(
    ("backend", "precision"), [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in SLOW)]
)
def test_a_score_depends_on_its_pair_alone(
    backend: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(backend, precision)
    model, chance = deterministic(backend, precision), np.random.default_rng(1)
    rows = np.arange(len(QUERIES) if backend != "mlx" else 8)  # a row alone takes MLX half a second on Linux
    first = bits(Engine(model, 2048), rows)
    for budget, some in ((1, rows), (300, rows[::2]), (2048, rows[:7]), (4096, rows)):
        order = chance.permutation(some)
        mine = Engine(model, budget).score([QUERIES[row] for row in order], [PASSAGES[row] for row in order])
        assert (mine.scores.view(np.uint32) == first[order]).all()
        assert mine.padded_tokens == mine.tokens
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (bits(Engine(deterministic(backend, precision), 2048), chance.permutation(rows)) == first).all()
    usual = scores_of(backend, precision, 2048)[0][rows]
    bound = 1e-5 if backend != "mlx" else 1e-4
    if precision != "fp32":  # both are within this bound of the model's own
        bound = 2 * proven_bound(backend, precision)
    assert np.abs(first.view(np.float32) - usual).max() <= bound


class Wrapped:
    """A backend of one output; `score` makes the logits of a batch."""

    name, device, precision, depth, bytes, pieces = "torch", "cpu", "fp32", 1, 0, 1
    shares_prefixes = packs = False

    def __init__(self, score: Callable[[Batch], np.ndarray]) -> None:
        self._score = score

    def submit(self, batch: Batch) -> Wrapped:
        self._logits = self._score(batch)
        return self

    def result(self) -> np.ndarray:
        return self._logits


def test_no_memory_is_said_when_all_rows_have_ended() -> None:
    ended: list[int] = []

    def score(batch: Batch) -> np.ndarray:
        ended.append(batch.ids.shape[1])
        if batch.ids.shape[1] == 3:
            raise OutOfMemory("too long")
        return np.zeros(1, np.float32)

    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    with pytest.raises(OutOfMemory):
        Alone(Wrapped(score), backends()["torch"]).submit(Batch.padded(mask, None, mask)).result()
    assert sorted(ended) == [1, 2, 3]


def test_a_backend_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = iter(range(1000))
    noisy: Backend = Wrapped(lambda batch: np.full(len(batch.ids), next(calls) * 1e-7, np.float32))
    monkeypatch.setattr(
        "rankmill.workers.models.loading._load_backend", lambda *_: Alone(noisy, backends()["torch"])
    )
    with pytest.raises(WorkerError, match="a pair by itself does not get the same bits each time"):
        load_proven(
            ScoreSpec(model="demo", precision="fp32", deterministic=True), "cpu", "torch", str(tmp_path)
        )
