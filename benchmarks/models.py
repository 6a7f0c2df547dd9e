"""Random models of any size, for benchmarks of everything except the model."""

from __future__ import annotations

from pathlib import Path

import examples

DEMO_MODEL = Path(examples.__file__).parent / "demo-model"


def random_bert(directory: Path, *, hidden: int, layers: int, heads: int = 2, positions: int = 128) -> Path:
    """A BERT cross-encoder in `directory`: random weights, the demo model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, model_max_length=positions)
    tokenizer.save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=positions,
        num_labels=1,
        initializer_range=hidden**-0.5,  # wide, so that scores differ visibly
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).eval().save_pretrained(directory)
    return directory
