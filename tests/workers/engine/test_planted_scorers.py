"""Scorers that are wrong only in large batches, some lengths, after odd rows or for some specs.

A plant is refused at load, or its first large batch is, or its first spec: no wrong score is answered.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.torch import backend as torch_backend
from rankmill.workers.engine import engine as engines
from rankmill.workers.engine import proving
from rankmill.workers.engine.engine import Engine, ScoresChanged
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.probing import Probed
from rankmill.workers.engine.proving import Proving, load_proven
from rankmill.workers.engine.work import prepare
from rankmill.workers.models import activation, loading, tokenizer
from rankmill.workers.models.loading import Model
from tests.conftest import wait_for
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_decoder
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.workers.engine.test_proving import (
    in_the_logits,
    in_the_network,
    lost_bias,
    norm_with_another_epsilon,
    swapped_segments,
)

pytestmark = pytest.mark.own_precision

Patch = pytest.MonkeyPatch

WORDS = [
    "the",
    "moon",
    "is",
    "far",
    "away",
    "and",
    "nobody",
    "knows",
    "how",
    "long",
    "a",
    "river",
    "flows",
    "under",
    "old",
    "stone",
    "bridges",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert") / "model", positions=512)


def in_batches(patch: Patch, wrong: Callable[[Any], Any]) -> None:
    """Add 1 to the rows that `wrong` names of a batch."""
    finish = engines.Engine._scatter

    def scatter(self: Engine, parts: Any, logits: Logits) -> None:
        lengths = np.concatenate([work.tokens.lengths[rows] for work, rows in parts])
        logits = np.array(logits)
        logits[wrong(lengths)] += 1
        finish(self, parts, logits)

    patch.setattr(engines.Engine, "_scatter", scatter)


def from_row_40_on(patch: Patch) -> None:
    in_batches(patch, lambda lengths: np.arange(len(lengths)) >= 40)


def beyond_64_rows(patch: Patch) -> None:
    in_batches(patch, lambda lengths: np.full(len(lengths), len(lengths) > 64))


def beyond_4096_padded_tokens(patch: Patch) -> None:
    in_batches(patch, lambda lengths: np.full(len(lengths), len(lengths) * lengths.max() > 4096))


def in_rows_of_180_to_449_tokens(patch: Patch) -> None:
    in_batches(patch, lambda lengths: (lengths >= 180) & (lengths <= 449))


def in_rows_of_equal_length(patch: Patch) -> None:
    in_batches(patch, lambda lengths: np.full(len(lengths), len(lengths) > 1 and np.ptp(lengths) == 0))


def in_many_rows_of_40_to_130_tokens(patch: Patch) -> None:
    in_batches(
        patch, lambda lengths: np.full(len(lengths), len(lengths) >= 16 and 40 <= lengths.max() <= 130)
    )


def swapped_works(patch: Patch) -> None:
    """Of three chunks in a batch, the first two get each other's scores."""
    scatter = engines.Engine._scatter

    def swapped(self: Engine, parts: Any, logits: Logits) -> None:
        scatter(self, parts if len(parts) < 3 else [parts[1], parts[0], *parts[2:]], logits)

    patch.setattr(engines.Engine, "_scatter", swapped)


def the_first_batch_s_logits_for_a_second_of_its_shape(patch: Patch) -> None:
    submit, first = torch_backend.TorchBackend.submit, dict[tuple[int, int], Any]()
    patch.setattr(
        torch_backend.TorchBackend,
        "submit",
        lambda self, batch: first.setdefault(batch.shape, submit(self, batch)),
    )


def overwritten_by_the_next_forward(patch: Patch) -> None:
    """Two forwards are in progress at a time, and the second one moves the first one's logits by a row."""
    submit, result, begun = torch_backend.TorchBackend.submit, torch_backend.TorchForward.result, list[Any]()

    def begin(self: Any, batch: Any) -> Any:
        begun.append(submit(self, batch))
        return begun[-1]

    patch.setattr(torch_backend.TorchBackend, "__init__", with_two_in_progress)
    patch.setattr(torch_backend.TorchBackend, "submit", begin)
    patch.setattr(
        torch_backend.TorchForward,
        "result",
        lambda self: result(self) if begun[-1] is self else np.roll(result(self), 1),
    )


_init = torch_backend.TorchBackend.__init__


def with_two_in_progress(self: Any, *args: Any) -> None:
    _init(self, *args)
    self.depth = 2


def a_sigmoid_of_four_decimals(patch: Patch) -> None:
    right = activation._sigmoid
    patch.setattr(activation, "_sigmoid", lambda logits: np.round(right(logits), 4))
    patch.setitem(activation._OWN, "Sigmoid", activation._sigmoid)


def texts_that_end_at_a_control_character(patch: Patch) -> None:
    call = tokenizer.PairTokenizer.__call__

    def cut(texts: Any) -> list[str]:
        return [text.partition("\0")[0] for text in texts]

    patch.setattr(
        tokenizer.PairTokenizer,
        "__call__",
        lambda self, queries, passages=None: call(
            self, cut(queries), None if passages is None else cut(passages)
        ),
    )


def half_a_percent_of_scale(patch: Patch) -> None:
    in_the_logits(patch, lambda logits: logits * 1.005)


def after_a_null_row(patch: Patch) -> None:
    """The texts of a row after one without a text are those of the next."""
    prepare = vars(engines)["prepare"]

    def shifted(model: Any, queries: Any, passages: Any = None, **options: Any) -> Any:
        if passages is not None and None in passages:
            first = list(passages).index(None) + 1
            passages = [*passages[:first], *passages[first + 1 :], *passages[first : first + 1]]
        return prepare(model, queries, passages, **options)

    patch.setattr(engines, "prepare", shifted)
    patch.setattr("rankmill.workers.engine.probing.prepare", shifted)


def texts_that_begin_alike_taken_for_one(patch: Patch) -> None:
    call = tokenizer.PairTokenizer.__call__

    def taken(texts: Any) -> list[str]:
        first: dict[str, str] = {}
        return [first.setdefault(text[:200], text) for text in texts]

    patch.setattr(
        tokenizer.PairTokenizer,
        "__call__",
        lambda self, queries, passages=None: call(
            self, taken(queries), None if passages is None else taken(passages)
        ),
    )


def permuted_heads(patch: Patch) -> None:
    def permute(network: Any) -> None:
        attention = network.bert.encoder.layer[0].attention.self
        size = attention.attention_head_size
        attention.value.weight.copy_(attention.value.weight.roll(size, 0))
        attention.value.bias.copy_(attention.value.bias.roll(size, 0))

    in_the_network(patch, permute)


SCORERS = [
    from_row_40_on, beyond_64_rows, beyond_4096_padded_tokens, in_rows_of_180_to_449_tokens,
    in_rows_of_equal_length, swapped_works, in_many_rows_of_40_to_130_tokens,
    the_first_batch_s_logits_for_a_second_of_its_shape, overwritten_by_the_next_forward,
    a_sigmoid_of_four_decimals, texts_that_end_at_a_control_character,
    half_a_percent_of_scale, after_a_null_row, texts_that_begin_alike_taken_for_one, permuted_heads,
    swapped_segments, lost_bias, norm_with_another_epsilon,
]  # fmt: skip


@pytest.mark.parametrize("plant", SCORERS)
def test_a_wrong_scorer_is_refused_at_load(
    plant: Callable[[Patch], None], model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(proving, "_BATCH_SECONDS", 60)  # however busy this machine is
    plant(monkeypatch)
    with pytest.raises(WorkerError, match="would not get its own scores"):
        load_proven(ScoreSpec(model=str(model), precision="fp32"), "cpu", "torch", str(tmp_path))


def test_a_batch_that_is_larger_than_any_is_compared_before_it_is_answered(
    model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(proving, "_BATCH_SECONDS", 1e-9)  # as with a model of billions of weights
    spec = ScoreSpec(model=str(model), precision="fp32")
    pairs = [("moon", " ".join(WORDS[: row % 9])) for row in range(200)]
    expected = cross_encoder(model).predict(pairs)

    def scored() -> Logits:
        engine = Engine(load_proven(spec, "cpu", "torch", str(tmp_path)).model(spec), 1 << 14)
        return engine.score(*zip(*pairs, strict=True)).scores

    with monkeypatch.context() as wrong:
        beyond_64_rows(wrong)
        with pytest.raises(ScoresChanged, match=r"a batch of \d+ rows has scores that differ by 1"):
            scored()
        # This host remembers it, and scores in another way, whose batches are smaller.
        np.testing.assert_allclose(scored(), expected, atol=1e-4)
    for file in (tmp_path / "proofs").glob("*.json"):
        file.unlink()
    np.testing.assert_allclose(scored(), expected, atol=1e-4)
    (file,) = (tmp_path / "proofs").glob("*.json")
    assert json.loads(file.read_text())["proof"]["rows"] >= 200
    monkeypatch.setattr(Probed, "repeated", None)  # what is known is not compared again
    np.testing.assert_allclose(scored(), expected, atol=1e-4)


def test_a_worker_answers_no_batch_that_is_wrong(model: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proving, "_BATCH_SECONDS", 1e-9)
    beyond_64_rows(monkeypatch)
    spec = ScoreSpec(model=str(model), precision="fp32")
    engine = Engine(load_proven(spec, "cpu", "torch", str(tmp_path)).model(spec), 1 << 14)
    pipeline, stops, answers = Pipeline(0.0), list[str](), list[str]()

    def stop(model: Model, figures: str) -> None:
        stops.append(f"{model.name}: {figures}")
        pipeline.wake()

    pipeline.changed = stop
    pipeline.start()
    for name, rows in (("small", 3), ("large", 200), ("later", 3)):
        work = prepare(engine.model, ["moon"] * rows, ["the river"] * rows)
        pipeline.put(engine, work, partial(answers.append, name))
        pipeline.wait_for(lambda: not pipeline.pending or bool(stops), 60)
    wait_for(lambda: bool(stops))
    pipeline.close(finish=False)
    assert answers == ["small"]
    assert str(model) in stops[0]
    assert "scores that differ by 1" in stops[0]


def test_the_probes_come_each_hour_however_many_specs_there_are(model: Path, tmp_path: Path) -> None:
    """A service may have more instructions than a worker has engines, so each engine is young."""
    spec = ScoreSpec(model=str(model), precision="fp32")
    loaded = load_proven(spec, "cpu", "torch", str(tmp_path))

    def young(instruction: str) -> Engine:
        return Engine(loaded.model(spec.model_copy(update={"instruction": instruction})), 512)

    assert not young("find: ").must_prove
    loaded.last_probes.at -= engines.PROVE_SECONDS + 1
    engine = young("look for: ")
    assert engine.must_prove
    engine.prove()
    assert not young("find: ").must_prove


SPECS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 20},
    "truncation_side": {"max_length": 20, "truncation_side": "left"},
    "instruction": {"instruction": "find the river: "},
    "max_passage_tokens": {"max_passage_tokens": 7},
    "long": {"max_length": 24, "long": "split"},
    "long_stride": {"max_length": 24, "long": "split", "long_stride": 3},
    "refuse": {"max_length": 24, "long": "refuse"},
}


@pytest.mark.parametrize("asked", SPECS)
def test_what_a_spec_adds_is_compared_when_it_is_first_met(
    asked: str, model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    spec = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **SPECS[asked]})
    loaded = load_proven(spec, "cpu", "torch", str(tmp_path))
    loaded.model(spec)
    (file,) = (tmp_path / "proofs").glob("specs-*.json")
    assert len(json.loads(file.read_text())["specs"]) == 1
    monkeypatch.setattr("rankmill.workers.engine.spec_check.load_tokenizer", None)  # it is known now
    load_proven(spec, "cpu", "torch", str(tmp_path)).model(spec)
    load_proven(spec, "cpu", "torch", str(tmp_path)).model(spec.model_copy(update={"activation": "sigmoid"}))


def test_a_window_that_begins_with_an_earlier_one_s_text_is_told_from_it(tmp_path: Path) -> None:
    """A probe repeats its words each 41 tokens of this model, and so do its windows."""
    loaded = load_proven(ScoreSpec(model="demo", precision="fp32"), "cpu", "torch", str(tmp_path))
    for long in ("split", "split-mean"):
        loaded.model(ScoreSpec(model="demo", precision="fp32", long=long))


def forgets(asked: str) -> Callable[[Any], Any]:
    """A function of a spec that does as if the spec did not have an option."""
    return lambda right: lambda spec, *others: right(spec.model_copy(update={asked: None}), *others)


FORGOTTEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_length": ("find_max_length", lambda right: lambda spec, about: 512),
    "truncation_side": ("tokenizer_for", forgets("truncation_side")),
    "instruction": ("tokenizer_for", forgets("instruction")),
    "max_passage_tokens": (
        "Model",
        lambda right: lambda **fields: right(**fields | {"short_passages": None}),
    ),
    "long": ("Model", lambda right: lambda **fields: right(**fields | {"windows": None})),
    "long_stride": ("Windows", lambda right: lambda whole, joined, stride: right(whole, joined, None)),
}


@pytest.mark.parametrize("asked", FORGOTTEN)
def test_what_a_spec_adds_and_is_forgotten_is_refused(
    asked: str, model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    plain = ScoreSpec(model=str(model), precision="fp32")
    spec = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **SPECS[asked]})
    loaded = load_proven(plain, "cpu", "torch", str(tmp_path))
    name, break_it = FORGOTTEN[asked]
    monkeypatch.setattr(loading, name, break_it(vars(loading)[name]))
    with pytest.raises(SpecError, match=rf"would not get its own tokens with the options .*{asked}"):
        loaded.model(spec)


def test_another_template_than_the_proven_one_is_compared(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_decoder(tmp_path / "model", "qwen3", task="causal", template=PAIR_TEMPLATE)
    plain = ScoreSpec(model=str(folder), precision="fp32")
    other = plain.model_copy(
        update={"prompt_template": PAIR_TEMPLATE.replace("Judge", "Rate"), "instruction": "x"}
    )
    loaded = load_proven(plain, "cpu", "torch", str(tmp_path / "cache"))
    loaded.model(other)
    right = vars(loading)["tokenizer_for"]
    monkeypatch.setattr(
        loading,
        "tokenizer_for",
        lambda spec, *others: right(plain.model_copy(update={"instruction": "y"}), *others),
    )
    with pytest.raises(SpecError, match="prompt_template"):
        loaded.model(other.model_copy(update={"instruction": "z"}))


CHANGES: dict[str, tuple[str, Any] | dict[str, Any]] = {
    "device": ("device_name", lambda device: "another"),
    "threads": ("threads", lambda: 99),
    "instructions": ("cpu_flags", lambda: frozenset({"another"})),
    "kernels": ("forced_kernels", lambda: ["ANOTHER=1"]),
    "packages": ("version", lambda package: "another"),
    "release": ("_release", lambda: "another"),
    "precision": {"precision": "bf16"},
    "rows": {"inputs": "texts"},
    "bits": {"deterministic": True},
    "model": {},
}
"""What a kept proof depends on: a function of `proving` with another result, or another spec."""


@pytest.fixture(scope="module")
def proven(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the proof of `model`."""
    cache = tmp_path_factory.mktemp("proven") / "cache"
    load_proven(ScoreSpec(model=str(model), precision="fp32"), "cpu", "torch", str(cache))
    return cache


@pytest.mark.parametrize("changed", CHANGES)
def test_a_kept_proof_is_not_believed_for_anything_else(
    changed: str, model: Path, proven: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    def measured(*args: Any, **options: Any) -> None:
        raise WorkerError("it is proven again")

    monkeypatch.setattr(Proving, "measured", measured)
    cache, spec = shutil.copytree(proven, tmp_path / "cache"), {"model": str(model), "precision": "fp32"}
    load_proven(ScoreSpec.model_validate(spec), "cpu", "torch", str(cache))
    change = CHANGES[changed]
    if isinstance(change, tuple):
        monkeypatch.setattr(proving, *change)
    else:
        spec |= change or {"model": str(make_bert(tmp_path / "other", positions=512, seed=1))}
    with pytest.raises(WorkerError, match="it is proven again"):
        load_proven(ScoreSpec.model_validate(spec), "cpu", "torch", str(cache))


def test_what_is_kept_of_another_model_is_not_believed(model: Path, tmp_path: Path) -> None:
    other = make_bert(tmp_path / "other", seed=1)
    spec = ScoreSpec(model=str(model), precision="fp32")
    load_proven(spec, "cpu", "torch", str(tmp_path / "cache"))
    load_proven(ScoreSpec(model=str(other), precision="fp32"), "cpu", "torch", str(tmp_path / "foreign"))
    (mine,), (foreign,) = ((tmp_path / name / "proofs").glob("*.json") for name in ("cache", "foreign"))
    right = json.loads(mine.read_text())["about"]
    mine.write_bytes(foreign.read_bytes())  # under this name
    proof = load_proven(spec, "cpu", "torch", str(tmp_path / "cache")).proof
    assert proof
    assert proof.holds
    assert json.loads(mine.read_text())["about"] == right
