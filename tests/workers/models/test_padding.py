"""A model whose scores depend on padding is scored in batches of equal lengths, loudly; others are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.contract.proof import Way
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from tests.conftest import Server, StartWorker
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.harness.tools import slow_but
from tests.workers.engine.test_engine import some_pairs

pytestmark = pytest.mark.own_precision

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_labels": 1,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
READ_PADDING: dict[str, dict[str, Any]] = {
    "Nystromformer": {},
    "ConvBert": {"embedding_size": 32, "head_ratio": 1},
    "FNet": {},
}
MASK_IT: dict[str, dict[str, Any]] = {
    "Longformer": {"attention_window": 16},
    "DebertaV2": {"conv_kernel_size": 3, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "Deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "MPNet": {},
    "SqueezeBert": {"embedding_size": 32},
}
PAIRS = list(zip(*some_pairs(24), strict=True))


def make(family: str, directory: Path, **options: Any) -> Path:
    """A random classifier of a family of transformers, with the tokenizer of a tiny BERT."""
    import torch
    import transformers

    make_bert(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **{**SMALL, **options})
    getattr(transformers, f"{family}ForSequenceClassification")(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def way_of(model: Path, cache: Path, **spec: Any) -> Way:
    """The way in which a model is served; its scores are sentence-transformers' own, one by one."""
    wanted = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **spec})
    loaded = load_proven(wanted, "cpu", "torch", str(cache))
    assert loaded.proof is not None
    assert loaded.backend.precision == wanted.precision
    if wanted.precision == "fp32":
        theirs = cross_encoder(model).predict(PAIRS, batch_size=1)
        scored = Engine(loaded.model(wanted), 512).score(*zip(*PAIRS, strict=True))
        np.testing.assert_allclose(scored.scores, theirs, atol=1e-4)
    return loaded.proof.way


@pytest.mark.parametrize("family", slow_but(READ_PADDING, "Nystromformer"))
def test_what_reads_padding_is_scored_in_equal_lengths(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(family, tmp_path / "model", **READ_PADDING[family])
    assert way_of(model, tmp_path / "cache") == "equal"
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any("padded: differs by" in each for each in said)
    assert any("is scored by another way" in each for each in said)


@pytest.mark.parametrize("precision", slow_but(["fp32", "bf16"], "fp32"))
@pytest.mark.parametrize("family", slow_but(MASK_IT, "MPNet"))
def test_what_masks_it_is_padded(family: str, precision: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "model", **MASK_IT[family])
    assert way_of(model, tmp_path / "cache", precision=precision) == "padded"


def test_a_worker_scores_such_a_model_as_its_library_does(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make("Nystromformer", tmp_path / "model")
    workers()
    scores = Client(server.url, model=str(model), precision="fp32").score(PAIRS, timeout=60)
    np.testing.assert_allclose(scores, cross_encoder(model).predict(PAIRS, batch_size=1), atol=1e-4)
