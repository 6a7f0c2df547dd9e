"""How far a row's score differs with its batch and backend: in fp32 hardly, else as far as was proven."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.models.loading import load_model
from tests.harness.models.backends import require
from tests.workers.backends.test_backends import EXAMPLES

ROWS = [json.loads(line) for line in EXAMPLES.read_text().splitlines()][:24]
PAIRS = [row["query"] for row in ROWS], [row["passage"] for row in ROWS]
KINDS = [
    ("torch", "fp32"),
    ("openvino", "fp32"),
    ("onnx", "fp32"),
    ("torch", "bf16"),
    ("openvino", "bf16"),
    ("openvino", "int8-128"),
    ("onnx", "int8-dynamic-7bit"),
]


def scores_of(backend: str, precision: str, *budgets: int) -> list[Logits]:
    spec = ScoreSpec.model_validate({"model": "demo", "precision": precision, "activation": "identity"})
    model = load_model(spec, "cpu", backend)
    return [Engine(model, budget).score(*PAIRS).scores for budget in budgets]


@pytest.fixture(scope="module")
def exact() -> Logits:
    return scores_of("torch", "fp32", 2048)[0]


_SLOW = {("torch", "bf16"), ("openvino", "int8-128"), ("onnx", "int8-dynamic-7bit")}


@pytest.mark.parametrize(
    ("backend", "precision"),
    [pytest.param(*kind, marks=[pytest.mark.slow] if kind in _SLOW else []) for kind in KINDS],
)
def test_the_same_row_has_the_same_score(backend: str, precision: str, exact: Logits) -> None:
    require(backend, precision)
    alone, together = scores_of(backend, precision, 1, 2048)
    bound = 1e-5 if precision == "fp32" else proven_bound(backend, precision)
    assert np.abs(alone - together).max() <= bound
    assert np.abs(together - exact).max() <= bound


def proven_bound(backend: str, precision: str) -> float:
    spec = ScoreSpec.model_validate({"model": "demo", "precision": precision})
    proof = load_proven(spec, "cpu", backend, "auto").proof
    assert proof is not None
    return proof.bound
