"""Each family of rerankers has the scores of `CrossEncoder.predict`, whatever its batches are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from jobs.spec import ScoreSpec
from tests.harness.rerankers import ENCODERS, make_encoder
from tests.workers.test_engine import some_pairs
from workers.backends.base import Logits
from workers.backends.families import TRACEABLE
from workers.engine.engine import Engine
from workers.models.loading import load_model

QUERIES, PASSAGES = (
    [*texts, *texts[:3], *more]
    for texts, more in zip(some_pairs(16), (["", "so far", ""], ["", "", "the moon"]), strict=True)
)
"""Some rows are truncated, some are repeated, some have no text."""


def expected(model: Path, **options: object) -> Logits:
    """One pair at a time: no padding."""
    pairs = list(zip(QUERIES, PASSAGES, strict=True))
    scores: Logits = CrossEncoder(str(model), device="cpu").predict(pairs, batch_size=1, **options)
    return scores


def scores_of(
    model: Path, cache: Path, *, backend: str = "torch", budget: int = 300, **spec: object
) -> Logits:
    wanted = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **spec})
    loaded = load_model(wanted, "cpu", backend, str(cache))
    assert loaded.backend.name == backend
    scored = Engine(loaded, budget).score(QUERIES, PASSAGES)
    assert scored.errors == {}
    return scored.scores


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", name)
    theirs = expected(model, activation_fn=torch.nn.Identity())
    assert theirs.std() > 0.05
    for budget in (1, 400):
        ours = scores_of(model, tmp_path, budget=budget, activation="identity")
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(scores_of(model, tmp_path), expected(model), atol=1e-5)


@pytest.mark.parametrize("backend", ["openvino", "onnx"])
@pytest.mark.parametrize("name", [name for name, (kind, *_) in ENCODERS.items() if kind in TRACEABLE])
def test_encoders_as_graphs(name: str, backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"onnx": "onnxruntime"}.get(backend, backend))
    model = make_encoder(tmp_path / "model", name)
    theirs = expected(model, activation_fn=torch.nn.Identity())
    for budget in (64, 400):
        ours = scores_of(model, tmp_path, backend=backend, budget=budget, activation="identity")
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
