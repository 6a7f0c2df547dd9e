"""Tiny rerankers of each family, as people get them: random weights, the family's own kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.workers.models.test_tokenizer import FAMILIES as TOKENIZERS

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


def make_chain(directory: Path, name: str, modules: Callable[[int], list[Any]], **options: Any) -> Path:
    """A body without a head and the given modules of sentence-transformers after it, as that saves them."""
    import torch
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from transformers import AutoConfig, AutoModel

    kind, tokens, shape = ENCODERS[name]
    tokenizer = save_tokenizer(directory / "body", tokens, 64)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, initializer_range=0.3, **sizes, **shape)
    torch.manual_seed(0)
    AutoModel.from_config(config).eval().save_pretrained(directory / "body")
    chain = [Transformer(str(directory / "body")), *modules(config.hidden_size)]
    CrossEncoder(modules=chain, device="cpu", **options).save_pretrained(str(directory / "model"))
    return directory / "model"


PASS_ALL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}<|answer|>"
)
"""Carries the texts of all roles, as ChatML does, and names none."""

PAIR_TEMPLATE = (
    "{% set s = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first %}"
    "{% set q = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first %}"
    "{% set d = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first %}"
    "<s>Judge. {{ s or 'Answer it.' }}\nquery: {{ q }}\ndocument: {{ d }}</s>\nanswer"
)
DECODERS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 2, "attention_bias": True},
    "gemma": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma2": {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 16, "final_logit_softcapping": 2.0},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
}
"""Language models: transformers' model type and what is its own in the config."""


def make_decoder(directory: Path, kind: str, *, task: str, template: str | None, **more: Any) -> Path:
    """A random language model in `directory`: ``causal``, or ``classifier`` with one output."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    tokenizer = save_tokenizer(directory, "qwen2", 96)
    tokenizer.add_tokens(["yes", "no", "1", "0"])
    tokenizer.pad_token = "<pad>"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    shape = {**_SMALL, "max_position_embeddings": 96, "layer_types": None}
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    labels = {"num_labels": 1} if task == "classifier" else {}
    config = AutoConfig.for_model(
        kind, initializer_range=0.3, **{**shape, **DECODERS.get(kind, {}), **sizes, **labels, **more}
    )
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if task == "classifier" else AutoModelForCausalLM
    auto.from_config(config).eval().save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path, name: str, longest: int) -> Any:
    """A tokenizer of a family in `directory`; returns it."""
    tokenizer = TOKENIZERS[name]()
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(directory)
    return tokenizer
