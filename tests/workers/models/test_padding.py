"""A model whose scores depend on padding is refused; one whose scores differ by rounding alone is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import RunFailed, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.loading import load_model
from tests.conftest import Server, StartWorker
from tests.harness.models.tiny import make_bert

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
    "BigBird": {"block_size": 16, "num_random_blocks": 1},
}
MASK_IT: dict[str, dict[str, Any]] = {
    "Longformer": {"attention_window": 16},
    "DebertaV2": {"conv_kernel_size": 3, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "MPNet": {},
    "SqueezeBert": {"embedding_size": 32},
}


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", READ_PADDING)
def test_what_reads_padding_is_refused_with_the_figures(family: str, precision: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, **READ_PADDING[family])
    spec = ScoreSpec.model_validate({"model": str(model), "precision": precision})
    with pytest.raises(
        WorkerError, match=r"cannot be scored in batches: .* changes by \d.*in fp32 it may by"
    ):
        load_model(spec, "cpu", "torch")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", MASK_IT)
def test_what_masks_it_is_served(family: str, precision: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, **MASK_IT[family])
    spec = ScoreSpec.model_validate({"model": str(model), "precision": precision})
    assert load_model(spec, "cpu", "torch").backend.precision == precision


def test_a_run_with_such_a_model_ends_and_says_why(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make("Nystromformer", tmp_path / "model")
    workers()
    with pytest.raises(RunFailed, match=r"cannot be scored in batches: .* changes by"):
        Client(server.url, model=str(model)).score([("how", "far")] * 4, timeout=60)
