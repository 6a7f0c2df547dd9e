"""A worker that runs a kept graph starts without torch and transformers, and scores as with them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.description import PlainTokenizer, describe
from rankmill.workers.models.loading import load_model
from rankmill.workers.models.sources import DEMO_MODEL
from rankmill.workers.models.tokenizer import Joiner, tokenize_pairs
from tests.conftest import ENVIRON, run_command
from tests.harness.models.rerankers import make_encoder
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.harness.tools import needs_package

PAIRS = ["how far", "why"], ["a cat and the moon", "the big river " * 90]


def score(model: Path, cache: Path, backend: str) -> Any:
    spec = ScoreSpec(model=str(model), precision="fp32")
    return Engine(load_model(spec, "cpu", backend, str(cache)), 512).score(*PAIRS).scores


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        pytest.param("openvino", "int8-128", marks=pytest.mark.slow),
        pytest.param("onnx", "fp32", marks=pytest.mark.slow),
        ("auto", "auto"),
    ],
)
def test_with_a_kept_graph_neither_torch_nor_transformers_is_imported(
    backend: str, precision: str, tmp_path: Path
) -> None:
    """Which is what a worker's start is spent on."""
    for package in ("openvino", "onnxruntime"):
        needs_package(package)
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"
    environ = {"RANKMILL_BACKEND": backend, "RANKMILL_CACHE_DIR": str(cache)}
    code = f"""
import sys
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill import ScoringWorker; from rankmill.workers.host import health
from rankmill.workers.models.loading import load
from rankmill.workers.engine.cache import EngineCache
settings = load_settings()
how = "cpu", settings.backend, settings.cache_dir
engines = EngineCache(settings, "cpu", lambda spec: load(spec, *how), lambda: None)
engine = engines.get(ScoreSpec(model={str(model)!r}, precision={precision!r}))
print(engine.score(*{PAIRS!r}).scores.tolist())
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    # A fork: it has both anyway, and makes the graph.
    before = run_command("python", "-c", code, environ=environ)
    if backend == "auto":  # on a busy machine PyTorch may have been measured as the fastest
        (speeds,) = cache.glob("speeds/*.json")
        figures = {"openvino fp32": 2.0, "torch fp32": 1.0}
        change(speeds, gflops=figures)
        before = run_command("python", "-c", code, environ=environ)
        assert json.loads(speeds.read_text())["gflops"] == figures  # they were believed
    command = [sys.executable, "-c", code]
    after = subprocess.run(command, env=ENVIRON | environ, capture_output=True, text=True, check=True)
    (made, had), (kept, imported) = before.out.splitlines(), after.stdout.splitlines()
    assert (had, imported) == ("['torch', 'transformers']", "[]")
    np.testing.assert_allclose(json.loads(kept), json.loads(made), atol=1e-2)


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_tokenizer_that_is_kept_is_that_of_transformers(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    model = {"demo": DEMO_MODEL, "tiny": tiny_model}[name]
    describe(model, None, tmp_path)
    plain, own = describe(model, None, tmp_path).tokenizer, AutoTokenizer.from_pretrained(model)
    assert isinstance(plain, PlainTokenizer)
    assert Joiner.of(plain) is not None
    for fact in ("model_max_length", "pad_token_id", "all_special_tokens"):
        assert getattr(plain, fact) == getattr(own, fact)

    @settings(max_examples=60)
    @given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5), st.integers(5, 40))
    def check(pairs: list[tuple[str, str]], length: int) -> None:
        queries, passages = (list(column) for column in zip(*pairs, strict=True))
        ours, theirs = (tokenize_pairs(each, queries, passages, length) for each in (plain, own))
        for array in ("ids", "types", "offsets"):
            np.testing.assert_array_equal(getattr(ours, array), getattr(theirs, array))

    check()


def test_it_is_made_again_when_it_is_damaged_or_the_model_s_files_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, cache = make_bert(tmp_path / "model", activation="torch.nn.Identity"), tmp_path / "cache"
    first = score(model, cache, "torch")
    for file in cache.glob("models/*/*.json"):
        file.write_text(file.read_text()[:50])
        with caplog.at_level(logging.WARNING, "rankmill.workers"):
            np.testing.assert_array_equal(score(model, cache, "torch"), first)
        assert "is damaged and will be made again" in caplog.text
        caplog.clear()
        assert isinstance(describe(model, None, cache).tokenizer, PlainTokenizer)
    change(model / "tokenizer_config.json", model_max_length=8)
    for _ in range(2):
        assert describe(model, None, cache).tokenizer.model_max_length == 8
    change(model / "config.json", sentence_transformers={"activation_fn": "torch.nn.Sigmoid"})
    for _ in range(2):
        assert describe(model, None, cache).layout.activation == "torch.nn.Sigmoid"


def test_a_tokenizer_that_needs_transformers_stays_with_it(tmp_path: Path) -> None:
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"
    change(model / "tokenizer_config.json", truncation_side="left")
    for _ in range(2):
        assert not isinstance(describe(model, None, cache).tokenizer, PlainTokenizer)
    assert not list(cache.rglob("facts.json"))


def test_where_nothing_can_be_kept_the_model_is_scored_all_the_same(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "rankmill.workers"):
        assert np.isfinite(score(tiny_model, cache, "torch")).all()
    assert "so workers import transformers" in caplog.text


def test_a_cached_description_says_what_the_first_one_said(tmp_path: Path) -> None:
    """`rankmill models describe` named the pooling only at the first call."""
    model = make_encoder(tmp_path / "model", "modernbert, mean")
    poolings = [describe(model, None, tmp_path / "cache").config.classifier_pooling for _ in range(2)]
    assert poolings == ["mean"] * 2


def test_what_a_cached_description_lacks_is_an_error_and_no_default(tmp_path: Path) -> None:
    """Else a model would be scored in another way by the workers that read its description in the cache."""
    describe(DEMO_MODEL, None, tmp_path)
    config = describe(DEMO_MODEL, None, tmp_path).config
    assert config.num_labels == 1
    with pytest.raises(KeyError, match="KnownConfig lacks the field hidden_act"):
        getattr(config, "hidden_act", None)


def test_a_tokenizer_with_a_chat_template_keeps_it(tmp_path: Path) -> None:
    """Conversations were scored by the first worker of a host, and refused by others."""
    cross_encoder(make_bert(tmp_path / "plain")).save_pretrained(str(tmp_path / "model"))
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    about = [describe(tmp_path / "model", None, tmp_path / "cache") for _ in range(2)]
    assert about[0].layout.chat is False
    assert all(each.tokenizer.chat_template for each in about)
