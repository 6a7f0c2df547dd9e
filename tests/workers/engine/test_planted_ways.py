"""Faults in ways to score that a plain pair does not take: packed, as graphs, deterministic, other rows.

They are planted as in `test_proving`, and none is served.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.proof import Way
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends import alone, varlen
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.torch import backend as torch_backend
from rankmill.workers.backends.torch import graphs, packed
from rankmill.workers.batches.planner import WaitingRows
from rankmill.workers.engine import proving
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import use_threads
from rankmill.workers.models import activation, conversations, description, loading
from tests.harness.models.backends import require
from tests.harness.models.hub import fetched
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_decoder, make_encoder
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.harness.tools import slow_but
from tests.workers.backends.test_packed import Replayed, graphs_of
from tests.workers.engine.test_proving import (
    PAIRS,
    Patch,
    put_in_place,
    served,
    shifted_positions,
    skipped_layer,
)
from tests.workers.models.test_texts import TEMPLATE

pytestmark = pytest.mark.own_precision

TorchBackend = torch_backend.TorchBackend


def packs(patch: Patch, record: type[Replayed] | None = None) -> None:
    """Pack rows on this CPU, by the reference of the kernel; with `record`, as graphs."""
    init = TorchBackend.__init__

    def packing(self: Any, network: Any, device: str, precision: str) -> None:
        with torch.inference_mode(mode=False):
            assert network.prepare_packing()
        init(self, network, device, precision)
        self.packs = True
        if record:
            self.graphs = graphs_of(network, record, patch)

    patch.setattr(TorchBackend, "__init__", packing)
    patch.setattr(graphs, "_AS_GOOD", 1e9)
    patch.setattr(graphs, "_LONG", 1e9)


class Stale(Replayed):
    """A graph that computes the numbers of the rows that it was recorded with."""

    def __init__(self, forward: Any, shape: Any, buffer: torch.Tensor) -> None:
        super().__init__(forward, shape, buffer)
        self.logits = super().replay()

    def replay(self) -> torch.Tensor:
        return self.logits


def neighbours_keys(patch: Patch) -> None:
    """The ninth row of a batch sees the eighth."""
    attend = varlen.varlen_reference

    def leaking(
        query: Any, key: Any, value: Any, starts: Any, keys: Any, *others: Any, **options: Any
    ) -> Any:
        seen = attend(query, key, value, starts, keys, *others, **options)
        if len(starts) > 9:
            start, end, before, last = (int(each) for each in (starts[8], starts[9], keys[7], keys[9]))
            row = torch.tensor([0, end - start]), torch.tensor([0, last - before])
            part = query[start:end], key[before:last], value[before:last]
            seen[start:end] = attend(*part, *row, *others, **options)
        return seen

    patch.setattr(varlen, "varlen_reference", leaking)


def wider_windows(patch: Patch) -> None:
    attend = varlen.varlen_reference

    def wider(*states: Any, window_size: tuple[int, int] = (-1, -1), **options: Any) -> Any:
        back, ahead = (each + 1 if each > 0 else each for each in window_size)
        return attend(*states, window_size=(back, ahead), **options)

    patch.setattr(varlen, "varlen_reference", wider)


def later_positions(patch: Patch) -> None:
    positions = packed._positions

    def later(*args: Any) -> Any:
        found = np.array(positions(*args))
        return np.where((found >= 40) & (found < found.max()), found + 1, found)

    patch.setattr(packed, "_positions", later)


def packed_prefixes_of_others(patch: Patch) -> None:
    sharing = packed.PackedRows.sharing

    def other(found: Any, skipped: int | None) -> Any:
        return sharing(found._replace(of=np.where(found.of == 1, 0, found.of)), skipped)

    patch.setattr(packed.PackedRows, "sharing", other)


def more_than_64_rows(patch: Patch) -> None:
    attend = varlen.varlen_reference

    def other(query: Any, key: Any, value: Any, starts: Any, *others: Any, **options: Any) -> Any:
        seen = attend(query, key, value, starts, *others, **options)
        return seen * 1.1 if len(starts) > 65 else seen

    patch.setattr(varlen, "varlen_reference", other)


PACKED: dict[str, tuple[str, Callable[[Patch], None], Way]] = {
    "neighbours": ("bert", neighbours_keys, "padded"),
    "positions": ("bert", later_positions, "padded"),
    "windows": ("modernbert", wider_windows, "padded"),
    "prefixes": ("decoder", packed_prefixes_of_others, "shared"),
    "rows": ("bert", more_than_64_rows, "padded"),
}
"""A model, its planted fault, and the way in which it is then served."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {
        "bert": make_bert(top / "bert", layers=3, heads=4),
        "modernbert": make_encoder(top / "modernbert", "modernbert, cls"),
        "decoder": make_decoder(top / "decoder", "qwen3", task="causal", template=PAIR_TEMPLATE),
        "labels": make_bert(top / "labels", labels=3),
        "reward": make_decoder(top / "reward", "qwen3", task="classifier", template=TEMPLATE),
    }


@pytest.mark.parametrize("plant", slow_but(PACKED, "neighbours", "prefixes", "rows"))
def test_packed_rows_that_are_wrong_are_not_served(
    plant: str, models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    model, fault, way = PACKED[plant]
    monkeypatch.setattr(proving, "_BATCH_SECONDS", 60)  # however busy this machine is
    packs(monkeypatch)
    proof = served(models[model], tmp_path / "cache")
    assert proof is not None
    assert proof.way == "packed"
    fault(monkeypatch)
    monkeypatch.setattr(proving, "_release", lambda: "with a fault")
    proof = served(models[model], tmp_path / "cache")
    assert proof is not None
    assert proof.way == way


def test_graphs_of_packed_rows_are_proven_too(
    models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as right:
        packs(right, Replayed)
        proof = served(models["bert"], tmp_path / "right")
        assert proof is not None
        assert proof.way == "packed"
    packs(monkeypatch, Stale)
    proof = served(models["bert"], tmp_path / "stale")
    assert proof is not None
    assert proof.way == "padded"


def bits_by_place(patch: Patch) -> None:
    result = alone.RowForwards.result

    def other(self: Any) -> Logits:
        logits = np.array(result(self))
        logits.view(np.uint32)[8:] ^= 1
        return logits

    patch.setattr(alone.RowForwards, "result", other)


def bits_by_thread(patch: Patch) -> None:
    score = alone.Alone._score

    def other(self: Any, row: Any) -> Logits:
        logits = np.array(score(self, row))
        if threading.current_thread().name.endswith("_1"):
            logits.view(np.uint32)[...] ^= 1
        return logits

    patch.setattr(alone.Alone, "_score", other)


@pytest.mark.parametrize("plant", slow_but([bits_by_place, bits_by_thread], bits_by_place))
def test_what_is_deterministic_has_the_same_bits_or_is_refused(
    plant: Callable[[Patch], None], models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    use_threads(2)
    assert served(models["bert"], tmp_path / "cache", deterministic=True) is not None
    plant(monkeypatch)
    assert served(models["bert"], tmp_path / "other", deterministic=True) is None


def earlier_messages_lost(patch: Patch) -> None:
    read = conversations.read_messages
    patch.setattr(conversations, "read_messages", lambda text: read(text)[-2:])


def a_squashed_score(patch: Patch) -> None:
    chosen = vars(loading)["activation"]
    patch.setattr(
        loading, "activation", lambda asked, saved, *others: chosen(asked, "torch.nn.Sigmoid", *others)
    )


@pytest.mark.parametrize(
    ("model", "inputs", "plant"),
    [("reward", "conversations", earlier_messages_lost), ("bert", "texts", a_squashed_score)],
)
def test_other_rows_than_pairs_are_proven_too(
    model: str, inputs: str, plant: Callable[[Patch], None], models: dict[str, Path], tmp_path: Path,
    monkeypatch: Patch,
) -> None:  # fmt: skip
    spec = ScoreSpec.model_validate({"model": str(models[model]), "precision": "fp32", "inputs": inputs})
    proving.load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    plant(monkeypatch)
    with pytest.raises(WorkerError, match="would not get its own scores"):
        proving.load_proven(spec, "cpu", "torch", str(tmp_path / "other"))


def another_label(patch: Patch) -> None:
    choose = vars(loading)["choose_output"]
    patch.setattr(
        loading, "choose_output", lambda *args: None if (n := choose(*args)) is None else (n + 1) % 3
    )


def another_number(patch: Patch) -> None:
    choose = vars(loading)["choose_output"]
    off = {"1": "0", "2": "1"}  # as if numbers began with 1
    patch.setattr(
        loading, "choose_output", lambda label, *others: choose(off.get(str(label), label), *others)
    )


def the_softmax_for_the_sigmoid(patch: Patch) -> None:
    patch.setitem(activation._OWN, "Sigmoid", activation._softmax)


def the_softmax_of_the_chosen(patch: Patch) -> None:
    patch.setattr(activation, "_softmax", lambda logits: activation._sigmoid(logits - logits.mean()))


def labels_in_another_order(patch: Patch) -> None:
    order = vars(description.Description)["labels"].fget
    patch.setattr(description.Description, "labels", property(lambda self: order(self)[::-1]))


@pytest.mark.parametrize(
    "plant",
    slow_but(
        [
            another_label, another_number, the_softmax_for_the_sigmoid, the_softmax_of_the_chosen,
            labels_in_another_order,
        ],
        another_label, labels_in_another_order,
    ),
)  # fmt: skip
def test_another_output_or_function_than_was_asked_for_is_refused(
    plant: Callable[[Patch], None], models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    spec = ScoreSpec(model=str(models["labels"]), precision="fp32", label="LABEL_1", activation="softmax")
    loaded = proving.load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    scored = Engine(loaded.model(spec), 512).score(*zip(*PAIRS, strict=True)).scores
    theirs = cross_encoder(models["labels"]).predict(PAIRS, apply_softmax=True)
    np.testing.assert_allclose(scored, theirs[:, 1], atol=1e-4)
    plant(monkeypatch)
    with pytest.raises(
        WorkerError, match=r"the same output has another score|its outputs are LABEL_0, LABEL_1"
    ):
        proving.load_proven(spec, "cpu", "torch", str(tmp_path / "other"))


def test_a_row_that_no_batch_has_is_noticed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    take = WaitingRows.take

    def losing(self: Any) -> Any:
        return [(work, rows[:-1] if len(rows) > 5 else rows) for work, rows in take(self)]

    monkeypatch.setattr(WaitingRows, "take", losing)
    assert served(models["bert"], tmp_path / "cache") is None


def test_a_copy_that_has_changed_since_is_proven_again(models: dict[str, Path], tmp_path: Path) -> None:
    """Its digests are right, and its proof is known: only the content of the folder is another."""
    require("openvino")
    other = make_bert(tmp_path / "other", layers=3, heads=4, seed=1)
    for model, cache in ((models["bert"], "cache"), (other, "foreign")):
        spec = ScoreSpec(model=str(model), precision="fp32")
        proving.load_proven(spec, "cpu", "openvino", str(tmp_path / cache))
    kept, foreign = (next((tmp_path / name / "openvino").iterdir()) for name in ("cache", "foreign"))
    put_in_place(kept, foreign)
    assert served(models["bert"], tmp_path / "cache", "openvino") is None


def test_a_proof_is_of_the_kernels_that_the_environment_chooses(
    models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    def proofs() -> int:
        assert served(models["bert"], tmp_path / "cache") is not None
        return len(list((tmp_path / "cache" / "proofs").glob("*.json")))

    assert [proofs(), proofs()] == [1, 1]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert proofs() == 2


@pytest.mark.parametrize(
    "way",
    [
        "torch bf16",
        pytest.param("torch fp32", marks=pytest.mark.slow),
        pytest.param("openvino int8", marks=pytest.mark.long),  # it takes a minute
    ],
)
def test_a_large_model_is_held_to_its_own_precision(
    way: str, models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    backend, precision = way.split()
    require(backend, precision)
    monkeypatch.setattr(proving, "_LARGEST", 0)
    spec = ScoreSpec.model_validate({"model": str(models["bert"]), "precision": precision})
    proof = proving.load_proven(spec, "cpu", backend, str(tmp_path / "cache")).proof
    assert proof is not None
    assert proof.reference == "own"
    assert "in its precision" in str(proof)
    skipped_layer(monkeypatch)
    with pytest.raises(WorkerError, match="would not get its own scores"):
        proving.load_proven(spec, "cpu", backend, str(tmp_path / "other"))


@pytest.mark.parametrize("pad", [5, None, pytest.param(-1, marks=pytest.mark.slow)])
def test_padding_changes_little_in_a_large_language_model(
    pad: int | None, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its head took the padding for tokens, so any scores were right, and one without padding was refused."""
    monkeypatch.setattr(proving, "_LARGEST", 0)
    model = make_decoder(
        tmp_path / "model", "qwen3", task="classifier", template=PAIR_TEMPLATE, pad_token_id=pad
    )
    spec = ScoreSpec(model=str(model), precision="fp32")
    proof = proving.load_proven(spec, "cpu", "torch", str(tmp_path / "cache")).proof
    assert proof is not None
    assert proof.reference == "own"
    assert proof.own < 1e-4


def test_a_proof_of_a_time_when_memory_was_short_is_made_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    spec = ScoreSpec(model=str(models["bert"]), precision="fp32")

    def reference() -> str:
        proof = proving.load_proven(spec, "cpu", "torch", str(tmp_path / "cache")).proof
        assert proof is not None
        return proof.reference

    with monkeypatch.context() as short:
        short.setattr(proving, "free_memory", lambda: 0)
        assert [reference(), reference()] == ["own", "own"]
    assert reference() == "exact"
    monkeypatch.setattr(proving, "free_memory", lambda: 0)
    assert reference() == "exact"


def test_a_large_model_of_the_hub_is_large_too(tmp_path: Path, monkeypatch: Patch) -> None:
    """Weights in its folder that it does not load do not count."""
    folder = make_bert(fetched(tmp_path, monkeypatch))
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    spec = ScoreSpec(model="some/model", precision="fp32")

    def reference() -> str:
        proof = proving.load_proven(spec, "cpu", "torch", str(tmp_path / "cache")).proof
        assert proof is not None
        return proof.reference

    monkeypatch.setattr(proving, "_LARGEST", (folder / "model.safetensors").stat().st_size - 1)
    assert [reference(), reference()] == ["own", "own"]
    monkeypatch.setattr(proving, "_LARGEST", (folder / "model.safetensors").stat().st_size)
    assert reference() == "exact"


@pytest.mark.slow
@pytest.mark.timeout(900)  # the proof of 8 bits looks at more than others, and a busy machine takes minutes
def test_what_is_planted_in_8_bits_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    require("openvino", "int8")
    shifted_positions(monkeypatch)
    spec = ScoreSpec(model="demo", precision="int8")
    with pytest.raises(WorkerError, match="would not get its own scores"):
        proving.load_proven(spec, "cpu", "openvino", str(tmp_path / "other"))
