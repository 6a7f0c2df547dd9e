"""The last layer for the first token only: the same scores, for each family that allows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rankmill.workers.backends.first_token import read_first_token_only
from rankmill.workers.backends.openvino.recipe import smooth

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
DISTILBERT = {"vocab_size": 99, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": SMALL,
    "xlm-roberta": SMALL,
    "camembert": SMALL,
    "electra": {**SMALL, "embedding_size": 16},
    "distilbert": DISTILBERT,
}
OTHERS: dict[str, dict[str, Any]] = {
    "mpnet": SMALL,
    "deberta-v2": {**SMALL, "num_hidden_layers": 1, "conv_kernel_size": 3},
    "albert": {**SMALL, "embedding_size": 16},
    "modernbert": {**SMALL, "classifier_pooling": "mean", "local_attention": 8},
}
DEBERTA = {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
READS_FIRST = {
    **FAMILIES,
    "modernbert": {**SMALL, "classifier_pooling": "cls", "local_attention": 8},
    "deberta-v2": DEBERTA,
    "deberta-v2, shared": {**DEBERTA, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deberta-v2, c2p": {**DEBERTA, "pos_att_type": ["c2p"], "conv_kernel_size": 3},
    "deberta-v2, p2c": {**DEBERTA, "pos_att_type": ["p2c"], "position_buckets": -1},
    "deberta-v2, absolute": SMALL,
}


def small_model(family: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    family = family.partition(",")[0]
    config = AutoConfig.for_model(family, num_labels=1, initializer_range=0.3, **options)
    return AutoModelForSequenceClassification.from_config(config).eval()


def batch(*, padded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(5, 20, dtype=torch.long)
    if padded:
        for row in range(5):
            mask[row, 20 - 3 * row :] = 0
    return {"input_ids": torch.randint(5, 99, (5, 20)), "attention_mask": mask}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", READS_FIRST)
@torch.inference_mode()
def test_scores_are_those_of_the_plain_model(family: str, padded: bool) -> None:
    plain = small_model(family, READS_FIRST[family])
    fast = copy.deepcopy(plain)
    assert read_first_token_only(fast)
    expected, logits = (model(**batch(padded=padded)).logits for model in (plain, fast))
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", READS_FIRST)
@torch.inference_mode()
def test_the_last_layer_runs_for_one_token(family: str) -> None:
    fast = small_model(family, READS_FIRST[family])
    read_first_token_only(fast)
    assert fast.base_model(**batch(padded=True)).last_hidden_state.shape == (5, 1, 32)


@pytest.mark.parametrize("left_out", [(), ("bert.encoder.layer.2.attention.self.value",)])
@torch.inference_mode()
def test_recipes_of_earlier_releases_change_keys_and_values_too(left_out: tuple[str, ...]) -> None:
    plain = small_model("bert", SMALL)
    fast = copy.deepcopy(plain)
    layer = "bert.encoder.layer.2.attention.self"
    smooth(fast, {f"{layer}.{name}": torch.linspace(0.5, 2, 32) for name in ("key", "value")}, left_out)
    assert read_first_token_only(fast)
    expected, logits = (model(**batch(padded=True)).logits for model in (plain, fast))
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_are_left_as_they_are(family: str) -> None:
    model = small_model(family, OTHERS[family])
    before = str(model)
    assert not read_first_token_only(model)
    assert str(model) == before
