"""How far a row's score may differ with its batch and backend: docs/BACKENDS.md states these bounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.harness.models.backends import require
from tests.workers.backends.test_backends import EXAMPLES

ROWS = [json.loads(line) for line in EXAMPLES.read_text().splitlines()][:24]
PAIRS = [row["query"] for row in ROWS], [row["passage"] for row in ROWS]
BOUNDS = {
    ("torch", "fp32"): 1e-5,
    ("openvino", "fp32"): 1e-5,
    ("onnx", "fp32"): 1e-5,
    ("torch", "bf16"): 0.1,
    ("openvino", "bf16"): 0.1,
    ("openvino", "int8"): 0.1,
    ("onnx", "int8"): 1.5,
}


def scores_of(backend: str, precision: str, *budgets: int) -> list[Logits]:
    spec = ScoreSpec.model_validate({"model": "demo", "precision": precision, "activation": "identity"})
    model = load_model(spec, "cpu", backend)
    return [Engine(model, budget).score(*PAIRS).scores for budget in budgets]


@pytest.fixture(scope="module")
def exact() -> Logits:
    return scores_of("torch", "fp32", 2048)[0]


_SLOW = {("torch", "bf16"), ("openvino", "int8"), ("onnx", "int8")}


@pytest.mark.parametrize(
    ("backend", "precision"),
    [pytest.param(*kind, marks=[pytest.mark.slow] if kind in _SLOW else []) for kind in BOUNDS],
)
def test_the_same_row_has_the_same_score(backend: str, precision: str, exact: Logits) -> None:
    require(backend, precision)
    alone, together = scores_of(backend, precision, 1, 2048)
    bound = BOUNDS[backend, precision]
    assert np.abs(alone - together).max() <= bound
    # What a backend makes of fewer bits is its own; in fp32 they all say the same.
    assert np.abs(together - exact).max() <= (bound if precision == "fp32" else 1.5)


def test_the_document_has_these_bounds() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "BACKENDS.md").read_text()
    for (backend, precision), bound in BOUNDS.items():
        assert f"| {backend} {precision} | {bound:g} |" in text
