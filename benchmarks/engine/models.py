"""Makes random models of any size, for benchmarks of everything except the model, and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankmill.workers.models.sources import DEMO_MODEL


def random_bert(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    heads: int = 2,
    positions: int = 128,
    labels: int = 1,
    seed: int = 0,
    tokenizer: Any = None,
    entries: Mapping[str, object] | None = None,
) -> Path:
    """A BERT cross-encoder with random weights in `directory`; returns `directory`.

    Parameters
    ----------
    tokenizer
        Of transformers; default: the demo model's.
    entries
        More entries for its ``config.json``.
    """
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = tokenizer or AutoTokenizer.from_pretrained(DEMO_MODEL, model_max_length=positions)
    tokenizer.save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=positions,
        num_labels=labels,
        initializer_range=hidden**-0.5,  # wide, so that scores differ visibly
    )
    for name, value in (entries or {}).items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    BertForSequenceClassification(config).eval().save_pretrained(directory)
    return directory
