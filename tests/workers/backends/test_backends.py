"""Backends: each scores as plain transformers does, and the one that runs is the one to be expected."""

from __future__ import annotations

import copy
import json
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from rankmill import plugins
from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import ConfigError, SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.installation import install_line
from rankmill.workers.backends.auto import BackendChoice, backends, choose_backend
from rankmill.workers.backends.base import OutOfMemory
from rankmill.workers.backends.families import TRACEABLE
from rankmill.workers.backends.speed import INT8
from rankmill.workers.backends.torch import backend as torch_backend
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import use_threads
from rankmill.workers.models.loading import load_model
from tests.harness.models.backends import require
from tests.harness.models.rerankers import make_encoder
from tests.harness.models.tiny import make_bert
from tests.harness.tools import slow_but
from tests.workers.backends.test_first_token import FAMILIES, OTHERS, small_model
from tests.workers.engine.test_engine import one_at_a_time

CACHE = cache_folder("auto")
"""The suite's own."""

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "pairs.jsonl"


@pytest.fixture
def openvino_backend() -> Any:
    pytest.importorskip("openvino")
    from rankmill.workers.backends.openvino.backend import OpenVinoBackend
    from rankmill.workers.backends.openvino.graph import graph_of
    from rankmill.workers.backends.traceable import Traceable

    def backend(classifier: Any, precision: str) -> OpenVinoBackend:
        traced = Traceable(classifier)
        return OpenVinoBackend(graph_of(traced, traced.example(), precision), precision)

    return backend


def some_batch(rows: int, longest: int, types: int) -> Batch:
    rng = np.random.default_rng(rows)
    lengths = rng.integers(2, longest + 1, rows)
    lengths[0] = longest
    mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    ids = np.where(mask == 1, rng.integers(5, 99, mask.shape), 1)
    return Batch.padded(ids, rng.integers(0, types, mask.shape) if types > 1 else None, mask)


@torch.inference_mode()
def plain_logits(model: Any, batch: Batch) -> Any:
    inputs = {"input_ids": batch.ids, "token_type_ids": batch.types, "attention_mask": batch.mask}
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items() if array is not None}
    return model(**tensors).logits[:, 0].numpy()


@pytest.mark.parametrize("family", slow_but(FAMILIES, "bert", "distilbert"))
def test_openvino_scores_as_transformers_does(family: str, openvino_backend: Any) -> None:
    plain = small_model(family, FAMILIES[family])
    backend = openvino_backend(copy.deepcopy(plain), "fp32")
    types = getattr(plain.config, "type_vocab_size", 0)
    batches = [some_batch(*shape, types) for shape in [(5, 20), (1, 2), (3, 61), (17, 33), (2, 16)]]
    pending = [backend.submit(batch) for batch in batches]  # all under way at a time
    for batch, forward in zip(batches, pending, strict=True):
        np.testing.assert_allclose(forward.result(), plain_logits(plain, batch), atol=1e-5)


# Each has a head of its own.
@pytest.mark.parametrize("family", slow_but(["bert", "roberta", "distilbert"], "bert"))
def test_openvino_with_small_weights_and_several_threads(family: str, openvino_backend: Any) -> None:
    """OpenVINO loses the scale of a head with 8-bit weights, with two threads and not with one."""
    plain = small_model(family, FAMILIES[family])
    use_threads(2)
    try:
        backend = openvino_backend(copy.deepcopy(plain), "int8-128")
    finally:
        use_threads(1)
    batch = some_batch(17, 33, getattr(plain.config, "type_vocab_size", 0))
    logits, expected = backend.submit(batch).result(), plain_logits(plain, batch)
    assert np.abs(logits - expected).max() < 0.3 * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_openvino_ranks_the_example_as_fp32_does(precision: str, openvino_backend: Any) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()][:120]
    texts = [row["query"] for row in rows], [row["passage"] for row in rows]
    require("openvino", precision)
    ranks = []
    for each in ("fp32", precision):
        spec = ScoreSpec.model_validate({"model": "demo", "precision": each})
        model = load_model(spec, "cpu", "openvino")
        assert model.backend.name == "openvino"
        assert model.backend.precision in {"fp32", "bf16", *INT8}
        ranks.append(Engine(model, 4096).score(*texts).scores.argsort().argsort())
    assert np.min(np.corrcoef(ranks)) > 0.999 - 0.001 * (precision == "int8")


def test_padding_that_sees_no_token_gets_no_nan_in_openvino(tmp_path: Path, openvino_backend: Any) -> None:
    """Padding that is farther from all tokens of its row than ModernBERT's sliding window."""
    model = make_encoder(tmp_path, "modernbert, mean", labels=3)
    spec, batch = ScoreSpec(model=str(model), precision="fp32", all_labels=True), some_batch(5, 61, 0)
    expected, logits = (
        load_model(spec, "cpu", name).backend.submit(batch).result() for name in ("torch", "openvino")
    )
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_openvino_runs_the_families_it_is_known_to_score(openvino_backend: Any) -> None:
    """Whether ``auto`` takes it is a question of speed, which `test_speed` asks."""
    for family in TRACEABLE:
        assert backends()["openvino"].obstacle(AutoConfig.for_model(family), "cpu", "fp32") is None


def test_bf16_is_never_computed_in_fp32(openvino_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("bert")
    for has_bf16, able in ((True, "openvino"), (False, "torch")):
        monkeypatch.setattr("rankmill.workers.backends.openvino._has_bf16", lambda found=has_bf16: found)
        assert choose_backend("auto", "bf16", config, "cpu", CACHE) == BackendChoice(able, "bf16")
    assert choose_backend("openvino", "auto", config, "cpu", CACHE) == BackendChoice("openvino", "fp32")
    with pytest.raises(
        SpecError, match=r"openvino cannot be used: it has no bf16 on this CPU.*--backend torch"
    ):
        choose_backend("openvino", "bf16", config, "cpu", CACHE)


@pytest.mark.parametrize("family", sorted(set(OTHERS) - TRACEABLE))
def test_other_families_stay_with_pytorch_unless_that_fails(family: str, openvino_backend: Any) -> None:
    config = AutoConfig.for_model(family, **OTHERS[family])
    assert choose_backend("auto", "auto", config, "cpu", CACHE).backend == "torch"
    assert choose_backend("openvino", "fp32", config, "cpu", CACHE) == BackendChoice("openvino", "fp32")
    torch_s = {("torch", each) for each in ("fp32", "bf16")}  # of the others the faster, as measured
    chosen = choose_backend("auto", "fp32", config, "cpu", CACHE, without=torch_s).backend
    assert chosen in {"openvino", "onnx"}


def test_a_deberta_is_scored_all_the_same(tmp_path: Path, tiny_model: Path) -> None:
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    options = {**OTHERS["deberta-v2"], "vocab_size": 200, "type_vocab_size": 2}
    small_model("deberta-v2", options).save_pretrained(tmp_path)
    queries, passages = ["what big moon"] * 4, ["a cat", "", "the dog and the king", "tea " * 50]
    engine = Engine(
        load_model(ScoreSpec(model=str(tmp_path), precision="fp32", activation="identity"), "cpu"), 64
    )
    assert engine.model.backend.name == "torch"
    scores = engine.score(queries, passages).scores
    np.testing.assert_allclose(scores, one_at_a_time(tmp_path, queries, passages), atol=1e-5)


def test_a_gpu_is_pytorch_s() -> None:
    config = AutoConfig.for_model("bert")
    assert choose_backend("auto", "fp16", config, "cuda", CACHE) == BackendChoice("torch", "fp16")
    with pytest.raises(SpecError, match="it runs on CPUs, not on cuda"):
        choose_backend("openvino", "auto", config, "cuda", CACHE)


def test_without_openvino_auto_is_another_and_asking_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    spec = ScoreSpec(model=str(tiny_model))
    assert load_model(spec, "cpu").backend.name in {"torch", "onnx"}
    with pytest.raises(SpecError, match=re.escape(f"not installed ({install_line('worker')})")):
        load_model(spec, "cpu", "openvino")


def test_fewer_bits_without_a_package_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("bert")
    chosen, exact = (choose_backend("auto", each, config, "cpu", CACHE) for each in ("int8", "auto"))
    worth_it = chosen.backend == "openvino" and chosen.precision in INT8
    assert worth_it or (chosen.backend, chosen.precision) == (exact.backend, exact.precision)  # as measured
    monkeypatch.setitem(sys.modules, "openvino", None)
    onnx = BackendChoice("onnx", backends()["onnx"].int8()[0])
    assert choose_backend("auto", "int8", config, "cpu", CACHE) == onnx
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SpecError, match=r"no backend here: openvino .*; onnx .*\[onnx\]"):
        choose_backend("auto", "int8", config, "cpu", CACHE)


def test_what_apple_s_gpu_runs_out_of_is_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are those of PyTorch's allocator; there is no such GPU here."""
    emptied: list[str] = []
    monkeypatch.setattr(torch_backend, "empty_cache", emptied.append)
    with pytest.raises(OutOfMemory), torch_backend._device_errors("mps"):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB).")
    with pytest.raises(OutOfMemory), torch_backend._device_errors("cuda"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(RuntimeError, match="of another kind"), torch_backend._device_errors("mps"):
        raise RuntimeError("of another kind")
    assert emptied == ["mps", "cuda"]


def test_a_forward_that_ran_out_of_memory_leaves_none_behind() -> None:
    """While its error is handled, smaller batches are tried: its states would be in their way."""
    states: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        hidden = torch.zeros(8)
        states.append(weakref.ref(hidden))
        raise RuntimeError("MPS backend out of memory")

    with pytest.raises(OutOfMemory) as raised, torch_backend._device_errors("cpu"):
        forward()
    assert raised.value
    assert states[0]() is None


@pytest.mark.parametrize("backend", ["torch", pytest.param("openvino", marks=pytest.mark.slow)])
def test_a_pair_of_8192_tokens_among_short_ones(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    make_bert(tmp_path, positions=8192)
    queries = ["how far"] * 50
    passages = ["a cat"] * 20 + ["the moon " * 9000] + ["a big dog"] * 29
    spec = ScoreSpec(model=str(tmp_path), precision="fp32", activation="identity")
    scored = Engine(load_model(spec, "cpu", backend), 4096).score(queries, passages)
    assert scored.padded_tokens < scored.tokens + 500  # the short ones are not padded to the long one
    some = [0, 20, 21]
    expected = one_at_a_time(tmp_path, queries[:3], [passages[row] for row in some])
    np.testing.assert_allclose(scored.scores[some], expected, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_a_tokenizer_without_a_pad_token(backend: str, tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip(backend)
    make_bert(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    queries, passages = ["how far"] * 3, ["a cat", "the big river and the king", ""]
    scores = [
        Engine(load_model(ScoreSpec(model=str(model), precision="fp32"), "cpu", backend), 512)
        .score(queries, passages).scores
        for model in (tmp_path, tiny_model)
    ]  # fmt: skip
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-6)


def test_a_backend_that_has_two_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_kind = backends()["torch"]
    monkeypatch.setattr(plugins, "names", lambda seam: ["mine"])
    monkeypatch.setattr(plugins, "load", lambda seam, name: torch_kind)
    with pytest.raises(ConfigError, match=r"^backend 'mine' calls itself 'torch'; correct its package"):
        backends.__wrapped__()
