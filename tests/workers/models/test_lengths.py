"""Models whose files set no limit of length are scored as sentence-transformers scores them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.families import POSITIONS_AFTER_PADDING
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.models.probes import scored_length
from tests.harness.models.rerankers import save_tokenizer
from tests.harness.models.tiny import cross_encoder
from tests.harness.tools import slow_but

pytestmark = pytest.mark.own_precision

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "t5",
        {
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 16,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "xlnet": ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    "mpnet": ("mpnet", {**_SMALL, "max_position_embeddings": 66}),
    "longformer": ("roberta", {**_SMALL, "max_position_embeddings": 70, "attention_window": 8}),
}
"""The kind of a tokenizer, and the config."""

POSITIONS = {"mpnet": 64, "longformer": 69}
PAIRS = [
    ("how far is the moon", "a big river"),
    ("why", "moon " * 30),
    ("", "tea"),
    ("cat", "bread river " * 9),
]
LONG = [("how far", "the moon is a big river and tea " * 80), ("tea " * 300, "bread " * 300)]


@pytest.fixture(params=slow_but(FAMILIES, "t5", "xlnet", "mpnet"))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, folder = request.param, tmp_path / "model"
    name, options = FAMILIES[kind]
    tokenizer = save_tokenizer(folder, name, 64)
    special = {each: getattr(tokenizer, each) for each in ("pad_token_id", "eos_token_id", "bos_token_id")}
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), num_labels=1, initializer_range=0.3, **special, **options
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).eval().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 10**30}))
    return folder


def scores(model: Path, pairs: list[tuple[str, str]], **spec: Any) -> np.ndarray:
    asked = ScoreSpec.model_validate(
        {"model": str(model), "precision": "fp32", "activation": "identity", **spec}
    )
    loaded = load_proven(asked, "cpu", "torch", str(model.with_name("cache")))
    scored = Engine(loaded.model(asked), 500).score(*map(list, zip(*pairs, strict=True)))
    assert scored.errors == {}
    return scored.scores


def theirs(model: Path, pairs: list[tuple[str, str]], **options: Any) -> np.ndarray:
    found = cross_encoder(model, **options)
    wanted: np.ndarray = found.predict(pairs, batch_size=1, activation_fn=torch.nn.Identity())
    return wanted


def test_models_without_a_limit_are_scored(model: Path) -> None:
    kind = json.loads((model / "config.json").read_text())["model_type"]
    most = POSITIONS.get(kind)
    limits = {} if most is None else {"max_length": most}  # sentence-transformers goes beyond it, and fails
    for pairs in (PAIRS, LONG):
        wanted = theirs(model, pairs, **limits)
        assert wanted.std() > 1e-3
        np.testing.assert_allclose(scores(model, pairs), wanted, atol=1e-5)
    length = {"max_length": 700 if most is None else 16}
    np.testing.assert_allclose(scores(model, LONG, **length), theirs(model, LONG, **length), atol=1e-5)
    if most:
        with pytest.raises(SpecError, match=f"max_length {most + 1} is more than the {most} positions"):
            scores(model, PAIRS, max_length=most + 1)


def test_all_families_that_count_positions_after_padding_are_known() -> None:
    counting = set()
    for kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        module = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
        found = importlib.util.find_spec(module)
        if found and found.origin and "create_position_ids_from_input_ids" in Path(found.origin).read_text():
            counting.add(kind)
    assert counting == POSITIONS_AFTER_PADDING


@pytest.mark.parametrize("kind", ["big_bird", "bigbird_pegasus"])
def test_probes_are_so_long_that_bigbird_s_attention_is_sparse(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    assert scored_length(config) > (5 + 2 * config.num_random_blocks) * config.block_size
