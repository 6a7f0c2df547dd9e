"""Rows end to end, without padding, have the logits of padded ones: each family, whatever the lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends import varlen
from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.backends.classifier import load_config
from rankmill.workers.backends.torch.backend import TorchBackend
from rankmill.workers.backends.torch.graphs import Graphs, rounded
from rankmill.workers.backends.torch.networks import LanguageModel, Network, load_network
from rankmill.workers.backends.torch.packed import PackedRows, PackedShape
from rankmill.workers.backends.torch.prefixes import find_shared_prefixes
from rankmill.workers.backends.torch.ways import has_kernel, pack_if_faster, packs_exactly
from rankmill.workers.batches.layout import ModelLayout, read_layout
from rankmill.workers.batches.planner import plan_batches
from rankmill.workers.batches.tokens import Batch, in_a_row, put_together, sharing
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.harness.models.rerankers import ENCODERS, make_chain, make_decoder, make_encoder

pytestmark = pytest.mark.own_precision

NEVER = {"deberta-v2", "deberta-v3", "deberta-v2 with a convolution"}
PACKED = [name for name in ENCODERS if name not in NEVER]
CHAINS = ["mean", "max", "cls"]
LANGUAGE_MODELS = [
    f"{kind}, {task}" for kind in ("qwen2", "qwen3", "llama", "mistral") for task in ("causal", "classifier")
]
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=9)


def load(folder: Path, name: str) -> Network:
    kind, _, task = name.partition(", ")
    if name in ENCODERS:
        make_encoder(folder, name)
        layout, answers = ModelLayout(task="classifier"), None
    elif kind == "chain":
        folder = make_chain(folder, "modernbert, cls", lambda width: modules(task, width))
        layout, answers = read_layout(folder, None, load_config(folder, None)), None
    else:
        make_decoder(folder, kind, task=task, template=None)
        layout = ModelLayout(task="causal" if task == "causal" else "classifier")
        answers = (5, 6) if task == "causal" else None
    return load_network(ModelFiles(folder, None, load_config(folder, None), folder, layout, answers))


def modules(pooling: str, width: int) -> list[Any]:
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling

    last = Dense(width, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    return [Pooling(width, pooling), last]


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Network]:
    return Networks(tmp_path_factory)


class Networks(dict[str, Network]):
    """Each is made when it is asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders

    def __missing__(self, name: str) -> Network:
        with torch.inference_mode(mode=False):
            network = load(self.folders.mktemp("model"), name)
        assert network.prepare_packing()
        return self.setdefault(name, network)


def rows_of(network: Network, lengths: list[int], seed: int = 0) -> Batch:
    """Rows of any tokens that the model knows, that for padding among them."""
    draw = np.random.default_rng(seed)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    known, config = network.model.get_input_embeddings().num_embeddings, network.model.config
    ids = draw.integers(0, known, mask.shape)
    ids = np.where(mask == 1, ids, config.pad_token_id)
    several = getattr(config, "type_vocab_size", 0) > 1
    return Batch.padded(ids, draw.integers(0, 2, mask.shape) * mask if several else None, mask)


def padded(network: Network, batch: Batch) -> torch.Tensor:
    types = None if batch.types is None else torch.from_numpy(batch.types)
    logits: torch.Tensor = network(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask), types)
    return logits


def packed(network: Network, rows: PackedRows, shape: PackedShape | None = None) -> torch.Tensor:
    shape = shape or rows.shape
    return network.packed(shape.taken_apart(torch.from_numpy(rows.filled(shape))))


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*PACKED, *(f"chain, {mode}" for mode in CHAINS), *LANGUAGE_MODELS])
@torch.inference_mode()
def test_logits_are_those_of_padded_rows(name: str, networks: dict[str, Network]) -> None:
    network = networks[name]

    @settings(max_examples=8, deadline=None)
    @given(LENGTHS, st.integers(0, 99))
    def check(lengths: list[int], seed: int) -> None:
        batch = rows_of(network, lengths, seed)
        expected, rows = padded(network, batch), network.pack(batch)
        equal(packed(network, rows), expected)
        # With rows and tokens that nothing reads, as in a graph of a larger shape.
        equal(packed(network, rows, rounded(rows.shape))[: len(lengths)], expected)
        equal(padded(network, batch), expected)  # the model still takes padded rows

    check()
    assert padded(network, rows_of(network, [9, 30, 50])).std() > 1e-3


@pytest.mark.parametrize("name", ["qwen3, causal", "llama, classifier"])
@torch.inference_mode()
def test_beginnings_that_rows_share_are_computed_once(name: str, networks: dict[str, Network]) -> None:
    network = networks[name]
    assert isinstance(network, LanguageModel)

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), LENGTHS), min_size=2, max_size=8))
    def check(drawn: list[tuple[int, list[int]]]) -> None:
        beginnings = {0: [7] * 30, 1: [8, 9] * 12, 2: []}
        ids = [beginnings[group] + rest for group, rest in drawn]
        tokens = sharing(in_a_row(ids), [str(group) for group, _ in drawn])
        batch = put_together([(tokens, np.arange(len(drawn)))], 0)
        found = find_shared_prefixes(batch, network.skipped)
        if found is None:
            return
        rows = network.pack_shared(found)
        assert len(rows.ids) < tokens.offsets[-1]
        equal(packed(network, rows), padded(network, batch))

    check()
    alike = sharing(in_a_row([[7] * 30 + [row] for row in range(6)]), ["same"] * 6)
    assert find_shared_prefixes(put_together([(alike, np.arange(6))], 0), network.skipped) is not None


@pytest.mark.parametrize("name", ["bert", "modernbert, mean", "qwen2, causal"])
def test_a_model_is_packed_if_the_scores_stay(name: str, tmp_path: Path) -> None:
    assert packs_exactly(load(tmp_path, name))


@pytest.mark.parametrize("name", [*sorted(NEVER), "gemma2, causal"])
def test_models_whose_attention_is_another_are_padded(name: str, tmp_path: Path) -> None:
    assert not packs_exactly(load(tmp_path, name))


def test_a_model_whose_rows_would_see_each_other_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say, as its attention does not hand on where rows begin."""
    network, right = load(tmp_path, "bert"), varlen.varlen_reference

    def leaking(*states: Any, **options: Any) -> torch.Tensor:
        query, key, value, starts, _, *_ = states
        whole = torch.tensor([0, len(query)], dtype=torch.int32)
        return right(query, key, value, whole if len(starts) else starts, whole, 0, 0, **options)

    monkeypatch.setattr(varlen, "varlen_reference", leaking)
    assert not packs_exactly(network)


def test_a_cpu_has_no_kernel() -> None:
    assert not has_kernel("cpu", torch.bfloat16)
    assert not has_kernel("cuda", torch.float32)


def test_the_faster_way_is_taken_if_its_logits_are_right(
    networks: dict[str, Network], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference stands for the kernel here: it is told how fast it is."""
    network = networks["bert"]
    backend = TorchBackend(network, "cpu", "fp32")
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("rankmill.workers.backends.torch.ways._CLOSE", {"fp32": 1e-4})
    monkeypatch.setattr("rankmill.workers.backends.torch.ways._TOKENS", 960)
    monkeypatch.setattr("rankmill.workers.backends.torch.ways._WHOLE_BATCH", 1920)
    now = 0.0
    monkeypatch.setattr("rankmill.workers.backends.torch.ways.time.perf_counter", lambda: now)
    submit, slow, launching = backend.submit, {True: 1.0, False: 2.0}, 0.0

    def timed(batch: Batch) -> Any:
        nonlocal now
        now += max(slow[backend.packs] * len(batch.rows.ids) / 900, launching)
        return submit(batch)

    monkeypatch.setattr(backend, "submit", timed)
    pack_if_faster(backend, network)
    assert backend.packs
    slow[True] = 3.0
    pack_if_faster(backend, network)
    assert not backend.packs
    slow.update({True: 0.002, False: 0.003})
    launching = 0.0035  # which a small batch waits for
    pack_if_faster(backend, network)
    assert backend.packs
    slow[True] = 0.004
    pack_if_faster(backend, network)
    assert not backend.packs
    slow[True] = 1.0
    monkeypatch.setattr(network, "packed", lambda rows: torch.ones(len(rows.read), 1))
    pack_if_faster(backend, network)
    assert not backend.packs
    assert "packed rows give other logits" in caplog.text

    def no_kernel(rows: object) -> torch.Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(network, "packed", no_kernel)
    caplog.clear()
    pack_if_faster(backend, network)
    assert not backend.packs
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


class Replayed:
    """Stands for a CUDA graph, which a CPU has not: the same forward again, from the buffer."""

    def __init__(self, forward: Any, shape: PackedShape, buffer: torch.Tensor) -> None:
        self.buffer, self.forward, self.shape = buffer, forward, shape

    def replay(self) -> torch.Tensor:
        logits: torch.Tensor = self.forward(self.shape.taken_apart(self.buffer))
        return logits


def graphs_of(
    network: Network, record: Callable[[Any, PackedShape, torch.Tensor], Replayed], patch: pytest.MonkeyPatch
) -> Graphs:
    """Graphs that a CPU can run."""
    patch.setattr("rankmill.workers.backends.torch.graphs.CudaGraph", record)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    return Graphs(network.packed, torch.from_numpy)


@torch.inference_mode()
def test_graphs_are_used_when_shapes_come_again_and_give_the_same(
    networks: dict[str, Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_module = "rankmill.workers.backends.torch.graphs"
    monkeypatch.setattr(f"{graphs_module}._AS_GOOD", 1e9)  # on a CPU they are no faster
    monkeypatch.setattr(f"{graphs_module}._LONG", 1e9)
    network = networks["bert"]
    graphs = graphs_of(network, Replayed, monkeypatch)
    used = 0
    for turn in range(40):
        batch = rows_of(network, [20 + turn % 7, 30, 25 - turn % 3], seed=turn)
        logits = graphs.begin(network.pack(batch))
        if logits is not None:
            used += 1
            equal(logits, padded(network, batch))
    assert used > 15
    assert graphs.kept
    found = graphs.begin(network.pack(rows_of(network, [60])))
    assert found is None  # a shape that has not come before
    rows = network.pack(rows_of(network, [20, 30]))
    for name, value in (("_AS_GOOD", 0.0), ("_LONG", 0.0)):
        with monkeypatch.context() as patched:
            patched.setattr(f"{graphs_module}.{name}", value)
            others = graphs_of(network, Replayed, patched)
            assert all(others.begin(rows) is None for _ in range(20))


@torch.inference_mode()
def test_shapes_whose_graphs_are_rejected_take_no_place(
    networks: dict[str, Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_module = "rankmill.workers.backends.torch.graphs"
    monkeypatch.setattr(f"{graphs_module}._AS_GOOD", 1e9)
    monkeypatch.setattr(f"{graphs_module}._LONG", 1e9)
    monkeypatch.setattr(f"{graphs_module}._MOST", 1)
    network = networks["bert"]
    short, long = (network.pack(rows_of(network, [tokens])) for tokens in (20, 60))

    class WrongIfShort(Replayed):
        def replay(self) -> torch.Tensor:
            return super().replay() + (self.shape.tokens < 40)

    graphs = graphs_of(network, WrongIfShort, monkeypatch)
    assert all(graphs.begin(short) is None for _ in range(20))
    assert any(graphs.begin(long) is not None for _ in range(20))
    assert graphs.kept == 1


@torch.inference_mode()
def test_a_graph_that_is_wrong_or_fails_is_not_used(
    networks: dict[str, Network], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankmill.workers.backends.torch.graphs._LONG", 1e9)
    network = networks["bert"]
    rows = network.pack(rows_of(network, [20, 30]))

    class Wrong(Replayed):
        def replay(self) -> torch.Tensor:
            return super().replay() + 1

    def failing(*_: object) -> Replayed:
        raise RuntimeError("operation not permitted when stream is capturing")

    for record in (Wrong, failing):
        graphs = graphs_of(network, record, monkeypatch)
        assert all(graphs.begin(rows) is None for _ in range(20))
        assert not graphs.kept
    assert "other logits than its forward" in caplog.text


def test_an_engine_that_packs_computes_no_padding(tmp_path: Path) -> None:
    folder = str(make_encoder(tmp_path / "model", "bert"))
    spec = ScoreSpec(model=folder, precision="fp32", activation="identity")
    model = load_model(spec, "cpu", "torch", str(tmp_path / "cache"))
    backend: Any = model.backend
    queries = ["far moon"] * 30
    passages = ["a b " * (row % 9 + 1) for row in range(30)]
    with_padding = Engine(model, 100, length_aware=False).score(queries, passages)
    assert with_padding.padded_tokens > with_padding.tokens
    assert backend.network.prepare_packing()
    backend.packs = True
    without = Engine(model, 100, length_aware=False).score(queries, passages)
    np.testing.assert_allclose(without.scores, with_padding.scores, atol=1e-5)
    assert without.padded_tokens == without.tokens == with_padding.tokens
    assert without.batches < with_padding.batches


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_packed_batches_are_filled_with_tokens(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget, packed=True)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[row] for row in batch) <= budget
    for batch, following in pairwise(batches):
        assert sum(lengths[row] for row in batch) + lengths[following[0]] > budget
