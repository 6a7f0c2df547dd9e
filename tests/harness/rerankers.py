"""Tiny rerankers of each family, as people get them: random weights, the family's own kind of tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.workers.test_tokenizer import FAMILIES as TOKENIZERS

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_DEBERTA = {**_SMALL, "relative_attention": True, "type_vocab_size": 0, "pos_att_type": ["p2c", "c2p"]}
_MODERNBERT = {**_SMALL, "local_attention": 8, "global_attn_every_n_layers": 2}

ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "bert", _SMALL),
    "roberta": ("roberta", "roberta", {**_SMALL, "max_position_embeddings": 70}),
    "xlm-roberta": ("xlm-roberta", "xlm-roberta", {**_SMALL, "max_position_embeddings": 70}),
    "camembert": ("camembert", "camembert", {**_SMALL, "max_position_embeddings": 70}),
    "electra": ("electra", "bert", {**_SMALL, "embedding_size": 16}),
    "distilbert": (
        "distilbert",
        "modernbert",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    ),
    "modernbert, cls": ("modernbert", "modernbert", {**_MODERNBERT, "classifier_pooling": "cls"}),
    "modernbert, mean": ("modernbert", "modernbert", {**_MODERNBERT, "classifier_pooling": "mean"}),
    "modernbert, the last layer is local": (
        "modernbert",
        "modernbert",
        {**_MODERNBERT, "num_hidden_layers": 4, "classifier_pooling": "cls"},
    ),
    "deberta-v2": ("deberta-v2", "deberta-v2", _DEBERTA),
    "deberta-v3": (
        "deberta-v2",
        "deberta-v2",
        {
            **_DEBERTA,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
    ),
    "deberta-v2 with a convolution": (
        "deberta-v2",
        "deberta-v2",
        {**_DEBERTA, "conv_kernel_size": 3, "position_buckets": 16, "share_att_key": True},
    ),
}
"""Name to transformers' model type, the kind of tokenizer and the config."""


def make_encoder(directory: Path, name: str, labels: int = 1, **more: Any) -> Path:
    """A random sequence classifier in `directory`, whose scores differ from pair to pair."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind, tokens, options = ENCODERS[name]
    tokenizer = save_tokenizer(directory, tokens, 64)
    config = AutoConfig.for_model(
        kind,
        num_labels=labels,
        initializer_range=0.3,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **options,
        **more,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).eval().save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path, name: str, longest: int) -> Any:
    """A tokenizer of a family in `directory`; returns it."""
    tokenizer = TOKENIZERS[name]()
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(directory)
    return tokenizer
