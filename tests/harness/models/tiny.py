"""Small models for tests, made on the spot: real architectures, random weights. Fixture `tiny_model`.

Also `cross_encoder`, whose scores rankmill's must equal.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.engine.models import random_bert

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = ["what", "how", "why", "moon", "cat", "dog", "tea", "bread", "river", "king", "far", "big"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer BERT: fast, and its scores differ from pair to pair."""
    return make_bert(tmp_path_factory.mktemp("tiny-model"))


def make_bert(
    directory: Path,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    positions: int = 128,
    labels: int = 1,
    activation: str | None = None,
    seed: int = 0,
    extra_words: Sequence[str] = (),
) -> Path:
    """A random BERT cross-encoder in `directory`, with a WordPiece tokenizer that knows letters."""
    letters = list(string.ascii_lowercase + string.digits + string.punctuation)
    vocab = [*_SPECIAL, *letters, *(f"##{letter}" for letter in letters), *_WORDS, *extra_words]
    return random_bert(
        directory,
        hidden=hidden,
        layers=layers,
        heads=heads,
        positions=positions,
        labels=labels,
        seed=seed,
        tokenizer=_tokenizer({token: number for number, token in enumerate(dict.fromkeys(vocab))}, positions),
        entries={"sentence_transformers": {"activation_fn": activation}} if activation else None,
    )


def put_weights(model: Path, file: str, index: str = "model.safetensors.index.json") -> Path:
    """Move a model's weights to another file, by the path that an index has then."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "np") as weights:
        names = list(weights.keys())
    (model / file).parent.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").rename(model / file)
    (model / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))
    return model / file


def _tokenizer(vocab: dict[str, int], positions: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **dict(zip(names, _SPECIAL, strict=True)),
    )


def cross_encoder(model: Path | str, **options: Any) -> Any:
    """sentence-transformers' `CrossEncoder` on the CPU; its import takes seconds, and few tests need it."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(model), device="cpu", **options)
