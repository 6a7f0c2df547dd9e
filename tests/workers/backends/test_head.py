"""The last projection is float32 whatever the rest is: scores are not rounded into ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.head import ExactHead, cast_all_but_head, heads_of
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.harness.models.backends import require
from tests.harness.models.tiny import make_bert
from tests.workers.backends.test_first_token import FAMILIES, OTHERS, batch, small_model
from tests.workers.engine.test_engine import some_pairs

PAIRS = some_pairs(400, longest=30)
KINDS = [
    pytest.param("torch", "bf16", marks=pytest.mark.slow),
    ("openvino", "bf16"),
    ("openvino", "int8-128"),
    ("onnx", "int8-dynamic-7bit"),
    *(pytest.param("mlx", precision, marks=pytest.mark.slow) for precision in ("fp16", "bf16", "int8")),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("small"), hidden=64)


def scores_of(model: Path, backend: str, precision: str, cache: Path) -> Logits:
    spec = ScoreSpec.model_validate({"model": str(model), "precision": precision, "activation": "identity"})
    return Engine(load_model(spec, "cpu", backend, str(cache)), 2048).score(*PAIRS).scores


@pytest.fixture(scope="module")
def exact(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Logits:
    return scores_of(small, "torch", "fp32", tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(("backend", "precision"), KINDS)
def test_fewer_bits_make_no_ties(
    backend: str, precision: str, small: Path, exact: Logits, tmp_path: Path
) -> None:
    require(backend, precision)
    fewer = scores_of(small, backend, precision, tmp_path)
    assert np.abs(exact - fewer).max() > 0
    assert len(np.unique(fewer)) >= 0.99 * len(np.unique(exact)) > 380


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
@torch.inference_mode()
def test_each_family_has_such_a_head(family: str) -> None:
    """And in bf16 its weights are those of the checkpoint, not what bf16 has left of them."""
    model = small_model(family, {**FAMILIES, **OTHERS}[family])
    plain = model(**batch(padded=True)).logits
    cast_all_but_head(model, torch.bfloat16, heads_of(model))
    (head,) = (module for module in model.modules() if isinstance(module, ExactHead))
    assert not torch.equal(head.weight, head.weight.bfloat16().float())
    logits = model(**batch(padded=True)).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain, atol=0.3, rtol=0.05)


@torch.inference_mode()
def test_positions_stay_exact_in_fewer_bits() -> None:
    """Where a rotary angle were rounded to 8 bits, a token at 1,000 would stand some places off."""
    options = {**OTHERS["modernbert"], "max_position_embeddings": 2048}
    model = small_model("modernbert", options)
    before = model.model.rotary_emb.full_attention_inv_freq.clone()
    cast_all_but_head(model, torch.bfloat16, heads_of(model))
    assert model.model.rotary_emb.full_attention_inv_freq.dtype == torch.float32
    torch.testing.assert_close(model.model.rotary_emb.full_attention_inv_freq, before, atol=0, rtol=0)
