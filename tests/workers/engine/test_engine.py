"""The engine: scores as transformers and sentence-transformers give them, whatever the rows are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rankmill.jobs.contract.errors import ConfigError, SpecError
from rankmill.jobs.contract.proof import Way
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Backend, DeviceLost, Logits, OutOfMemory, Pending
from rankmill.workers.backends.torch.backend import TorchForward
from rankmill.workers.batches.tokens import Batch, Tokens
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.probing import ids_of
from rankmill.workers.engine.work import prepare
from rankmill.workers.host.device import resolve_device
from rankmill.workers.models.loading import LastProbes, load_model
from rankmill.workers.models.sources import DEMO_MODEL
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.harness.tools import slow_but

pytestmark = pytest.mark.own_precision

WORDS = Path(__file__).read_text().replace('"', " ").split()


def some_pairs(count: int, longest: int = 60) -> tuple[list[str], list[str]]:
    rng = random.Random(1)
    queries = [" ".join(rng.choices(WORDS, k=rng.randint(1, 8))) for _ in range(max(count // 5, 1))]
    passages = [" ".join(rng.choices(WORDS, k=rng.randint(0, longest))) for _ in range(count)]
    return [rng.choice(queries) for _ in range(count)], passages


def engine(model: Path | str, budget: int = 512, backend: str = "auto", **spec: object) -> Engine:
    wanted = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **spec})
    return Engine(load_model(wanted, "cpu", backend), budget)


def one_at_a_time(model: Path | str, queries: list[str], passages: list[str]) -> Logits:
    """Logits by plain transformers, one pair at a time: no batch, no padding."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    limit = min(tokenizer.model_max_length, classifier.config.max_position_embeddings)
    logits = []
    with torch.inference_mode():
        for query, passage in zip(queries, passages, strict=True):
            texts = [query], [passage]  # lists: a bare "" would count as no passage at all
            inputs = tokenizer(*texts, truncation="longest_first", max_length=limit, return_tensors="pt")
            logits.append(classifier(**inputs).logits[0, 0].item())
    return np.array(logits, np.float32)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of MiniLM-L6, random weights; a word of `WORDS` is a few tokens, not one for each letter."""
    directory = tmp_path_factory.mktemp("minilm")
    words = sorted({part for word in WORDS for part in re.findall("[a-z]+", word.lower())})
    return make_bert(directory, hidden=384, layers=6, heads=12, positions=512, extra_words=words)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "minilm"])
def test_scores_agree_with_transformers_one_pair_at_a_time(name: str, minilm: Path) -> None:
    model: Path = DEMO_MODEL if name == "demo" else minilm
    queries, passages = some_pairs(30)
    scores = engine(model, 2048, activation="identity").score(queries, passages).scores
    np.testing.assert_allclose(scores, one_at_a_time(model, queries, passages), atol=1e-5)


@pytest.mark.parametrize("name", slow_but(["demo", "minilm", "tiny"], "tiny"))
def test_scores_agree_with_cross_encoder_predict(name: str, minilm: Path, tiny_model: Path) -> None:
    model = {"demo": DEMO_MODEL, "minilm": minilm, "tiny": tiny_model}[name]
    queries, passages = some_pairs(30)
    expected = cross_encoder(model).predict(list(zip(queries, passages, strict=True)))
    np.testing.assert_allclose(engine(model).score(queries, passages).scores, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (None, torch.sigmoid),
        ("torch.nn.modules.linear.Identity", lambda logits: logits),
        ("torch.nn.modules.activation.Tanh", torch.tanh),
    ],
)
def test_the_default_activation_is_the_model_s_own(
    activation: str | None, function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    model = make_bert(tmp_path, activation=activation)
    queries, passages = some_pairs(10)
    raw = engine(model, activation="identity").score(queries, passages).scores
    own = engine(model).score(queries, passages).scores
    np.testing.assert_allclose(own, function(torch.from_numpy(raw)).numpy(), atol=1e-6)
    expected = cross_encoder(model).predict(list(zip(queries, passages, strict=True)))
    np.testing.assert_allclose(own, expected, atol=1e-5)


def test_long_pairs_are_truncated_as_sentence_transformers_does(tiny_model: Path) -> None:
    queries, passages = ["the moon " * 90, "q"], ["b " * 100, "a cat " * 400]
    for max_length in (None, 40):
        encoder = cross_encoder(tiny_model, max_length=max_length)
        expected = encoder.predict(list(zip(queries, passages, strict=True)))
        scores = engine(tiny_model, max_length=max_length).score(queries, passages).scores
        np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_the_beginning_of_texts_is_cut_if_that_is_wanted(tiny_model: Path) -> None:
    queries, passages = some_pairs(12, longest=200)
    theirs = cross_encoder(tiny_model, processor_kwargs={"truncation_side": "left"})
    expected = theirs.predict(list(zip(queries, passages, strict=True)))
    found = engine(tiny_model, truncation_side="left").score(queries, passages).scores
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - engine(tiny_model).score(queries, passages).scores).max() > 1e-3


def test_passages_have_no_more_tokens_than_are_wanted(tiny_model: Path) -> None:
    queries, passages = some_pairs(12)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model).eval()
    logits, tokens = [], 0
    for query, passage in zip(queries, passages, strict=True):
        most = len(tokenizer([query], [""])["input_ids"][0]) + 7
        pair = tokenizer([query], [passage], truncation="only_second", max_length=most, return_tensors="pt")
        tokens += pair["input_ids"].numel()
        with torch.inference_mode():
            logits.append(classifier(**pair).logits[0, 0].item())
    for way in ("truncate", "split"):  # no window has what is behind them
        short = engine(tiny_model, max_passage_tokens=7, long=way, activation="identity")
        found = short.score(queries, passages)
        np.testing.assert_allclose(found.scores, logits, atol=1e-5)
        assert found.tokens == tokens


def test_a_pair_that_is_too_long_can_be_refused(tiny_model: Path) -> None:
    queries, passages = ["moon", "moon", "a"], ["the moon", "the moon " * 90, "b"]
    scored = engine(tiny_model, long="refuse").score(queries, passages)
    assert scored.errors.keys() == {1}
    assert re.fullmatch(r"the pair has \d+ tokens, and \d+ are taken: shorten .*", scored.errors[1])
    assert np.isnan(scored.scores[1])
    expected = engine(tiny_model).score(queries, passages).scores
    np.testing.assert_allclose(scored.scores[[0, 2]], expected[[0, 2]], atol=1e-5)
    limit = int(scored.errors[1].split()[6])
    longest = next(count for count in range(1, 99) if _tokens(tiny_model, "the " * count) > limit) - 1
    exact = engine(tiny_model, long="refuse").score(["a"], ["the " * longest])
    assert exact.errors == {}
    assert engine(tiny_model, long="refuse", max_passage_tokens=3).score(queries, passages).errors == {}


def _tokens(model: Path, passage: str) -> int:
    return len(AutoTokenizer.from_pretrained(model)("a", passage)["input_ids"])


def test_scores_do_not_depend_on_the_batches(tiny_model: Path) -> None:
    queries, passages = some_pairs(50)
    small, large = (engine(tiny_model, budget).score(queries, passages) for budget in (1, 100_000))
    assert (small.batches, large.batches) == (50, 1)
    np.testing.assert_allclose(small.scores, large.scores, atol=1e-5)
    assert small.tokens == large.tokens == small.padded_tokens < large.padded_tokens


@pytest.mark.slow
def test_bf16_is_close_to_fp32(minilm: Path) -> None:
    queries, passages = some_pairs(16, longest=20)  # a CPU without bf16 takes long
    exact = engine(minilm).score(queries, passages).scores
    rough = engine(minilm, precision="bf16").score(queries, passages).scores
    assert np.abs(exact - rough).max() < 0.05
    assert np.abs(exact - rough).max() > 0


def test_nulls_and_empty_texts(tiny_model: Path) -> None:
    scored = engine(tiny_model).score(["q", None, "", "q"], ["p", "p", "", None])
    assert scored.errors == {1: "query is null", 3: "passage is null"}
    assert np.isfinite(scored.scores).tolist() == [True, False, True, False]


def test_no_rows_give_no_scores(tiny_model: Path) -> None:
    assert len(engine(tiny_model).score([], []).scores) == 0
    assert engine(tiny_model).score([None], ["p"]).errors == {0: "query is null"}


def test_odd_characters_are_scored(tiny_model: Path) -> None:
    odd = ["\x00\x01\x07", "\u200f\u202e", "�" * 50, "🌙🌙", "\n\t\r", "e\u0301" * 300]
    scored = engine(tiny_model).score(["q"] * len(odd), odd)
    assert not scored.errors
    assert np.isfinite(scored.scores).all()


def test_a_passage_of_a_million_characters_is_truncated_like_any_other(tiny_model: Path) -> None:
    scored = engine(tiny_model).score(["q", "q"], ["a moon " * 150_000, "a moon " * 300])
    assert scored.scores[0] == pytest.approx(scored.scores[1], abs=1e-6)


class Misbehaving:
    """A backend that stumbles over marked tokens or large batches, and counts its forwards."""

    name, device, precision, depth = "misbehaving", "cpu", "fp32", 1
    packs = False
    pieces = 1

    def __init__(self, poison: int = -1, most_tokens: int = 1 << 30, value: float = 0.0) -> None:
        self.poison, self.most_tokens, self.value = poison, most_tokens, value
        self.forwards = 0

    def submit(self, batch: Batch) -> TorchForward:
        self.forwards += 1
        if batch.ids.size > self.most_tokens:
            raise OutOfMemory("too large")
        if (batch.ids == self.poison).any():
            raise RuntimeError("poison\nin the batch")
        return TorchForward(torch.full((len(batch.ids),), self.value), None)


def misbehaving(model: Path, **how: float) -> tuple[Engine, Misbehaving]:
    real = engine(model, budget=100_000)
    backend = Misbehaving(**how)  # type: ignore[arg-type]
    object.__setattr__(real.model, "backend", backend)
    return real, backend


def test_the_neighbours_of_a_row_that_breaks_the_model_are_scored(tiny_model: Path) -> None:
    poison = AutoTokenizer.from_pretrained(tiny_model).convert_tokens_to_ids("moon")
    broken, backend = misbehaving(tiny_model, poison=poison)
    scored = broken.score(["q"] * 256, ["a cat"] * 77 + ["the moon"] + ["a dog"] * 178)
    assert scored.errors == {77: "model: RuntimeError: poison in the batch"}
    assert np.isfinite(scored.scores).sum() == 255
    assert backend.forwards <= 2 * 8 + 1  # 256 rows: logarithmic, not 256


def test_a_text_on_which_the_tokenizer_panics_costs_only_its_row(tiny_model: Path) -> None:
    class PanicException(BaseException):  # as PyO3 names it
        pass

    def panics(queries: Sequence[str], passages: Sequence[str] | None = None) -> Tokens:
        if passages and "the moon" in passages:
            raise PanicException("index out of bounds")
        return real.model.tokenizer(queries, passages)

    real = engine(tiny_model)
    passages = ["a cat"] * 5 + ["the moon"] + ["a dog"] * 6
    tokenizer: Any = panics
    work = prepare(replace(real.model, tokenizer=tokenizer), ["q"] * 12, passages)
    assert work.scored.errors == {5: "tokenizer: PanicException: index out of bounds"}
    assert work.left == 11


@pytest.mark.parametrize("way", ["padded", "equal"])
@pytest.mark.parametrize("short", [False, True])
def test_a_failed_batch_calls_for_the_probes_unless_memory_is_short(
    tiny_model: Path, way: Way, *, short: bool
) -> None:
    """Also if its rows were computed apart from each other, because their lengths differ."""
    poison = AutoTokenizer.from_pretrained(tiny_model).convert_tokens_to_ids("moon")
    model = misbehaving(tiny_model, **({"most_tokens": 30} if short else {"poison": poison}))[0].model
    broken = Engine(replace(model, last_probes=LastProbes()), 100_000, way=way)
    broken.score(["q"] * 4, ["a cat", "the moon", "a dog", "a " * 40])
    assert broken.model.last_probes.errors_since != short


class Cut:
    """A real backend that cannot compute some batches, so that these are cut."""

    def __init__(self, real: Backend, *, poison: int = -1, most_tokens: int = 1 << 30) -> None:
        self._real, self._poison, self._most = real, poison, most_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def submit(self, batch: Batch) -> Pending:
        if batch.ids.size > self._most:
            raise OutOfMemory("too large")
        if (batch.ids == self._poison).any():
            raise RuntimeError("poison")
        return self._real.submit(batch)


@pytest.mark.parametrize("why", ["poison", "memory"])
def test_rows_of_several_chunks_keep_their_scores_if_their_batch_is_cut(why: str, tiny_model: Path) -> None:
    real = engine(tiny_model)
    chunks = [some_pairs(count) for count in (7, 20, 3, 11)]
    expected = [real.score(*chunk).scores for chunk in chunks]
    poison = AutoTokenizer.from_pretrained(tiny_model).convert_tokens_to_ids("moon")
    backend = Cut(real.model.backend, **({"poison": poison} if why == "poison" else {"most_tokens": 400}))
    cut = Engine(replace(real.model, backend=backend), 100_000)
    works = [prepare(cut.model, *chunk) for chunk in chunks]
    ended = cut.finish(cut.submit([(work, np.arange(len(work.rows))[::-1]) for work in works]))
    assert ended == works
    for work, theirs in zip(works, expected, strict=True):
        broken = [row for row, ids in enumerate(ids_of(work.tokens)) if poison in ids and why == "poison"]
        assert work.scored.errors == dict.fromkeys(broken, "model: RuntimeError: poison")
        theirs[broken] = np.nan
        np.testing.assert_allclose(work.scored.scores, theirs, atol=1e-5)


def test_out_of_memory_halves_the_budget_and_keeps_it(tiny_model: Path) -> None:
    """Shows: a batch does not fit into memory."""
    short, backend = misbehaving(tiny_model, most_tokens=300)
    scored = short.score(["q"] * 200, ["a cat"] * 200)
    assert not scored.errors
    assert 1 < scored.batches < backend.forwards
    assert short.size.token_budget < 100_000
    first, backend.forwards = backend.forwards, 0
    assert not short.score(["q"] * 200, ["a cat"] * 200).errors
    assert backend.forwards < first


def test_a_row_too_large_by_itself_is_that_row_s_error(tiny_model: Path) -> None:
    """Shows: a batch does not fit into memory."""
    short, _ = misbehaving(tiny_model, most_tokens=20)
    scored = short.score(["q"] * 3, ["a", "a " * 60, "a"])
    assert scored.errors == {1: "model: OutOfMemory: too large"}


def test_a_row_too_large_by_itself_makes_no_other_batch_smaller(tiny_model: Path) -> None:
    short, _ = misbehaving(tiny_model, most_tokens=20)
    assert short.score(["q"], ["a " * 60]).errors == {0: "model: OutOfMemory: too large"}
    assert short.size.token_budget == 100_000


def test_memory_that_others_have_taken_is_no_row_s_fault(tiny_model: Path) -> None:
    short, backend = misbehaving(tiny_model)
    assert not short.score(["q"] * 3, ["a", "a " * 60, "a"]).errors
    backend.most_tokens = 20
    assert short.score(["q"] * 2, ["a", "a " * 90]).errors == {1: "model: OutOfMemory: too large"}
    with pytest.raises(DeviceLost, match="no memory is left for a row such as it had memory for: too large"):
        short.score(["q"] * 3, ["a", "a " * 50, "a"])


def test_a_score_that_is_no_number_is_an_error(tiny_model: Path) -> None:
    overflowing, _ = misbehaving(tiny_model, value=float("nan"))
    scored = overflowing.score(["q", "q"], ["a", "b"])
    assert scored.errors[1] == "the model's output is not a number in fp32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": 3}, "has 3 outputs; name the one to score by with --label"),
        ({"activation": "some.module.Function"}, "names activation some.module.Function"),
    ],
)
def test_models_that_cannot_score_are_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        engine(make_bert(tmp_path, **change))  # type: ignore[arg-type]


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    make_bert(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save({}, tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(SpecError, match=r"no \*\.safetensors"):
        engine(tmp_path)


def test_damaged_weights_are_one_clear_error(tmp_path: Path) -> None:
    make_bert(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 10)
    with pytest.raises(SpecError, match="is damaged or cut off: it has no header"):
        engine(tmp_path)


def test_the_model_s_own_limits_are_kept(tiny_model: Path) -> None:
    with pytest.raises(SpecError, match="max_length 200 is more than the 128 positions of"):
        engine(tiny_model, max_length=200)
    with pytest.raises(SpecError, match="fp16 is not supported on cpu; use fp32, bf16"):
        engine(tiny_model, precision="fp16")


def test_auto_chooses_what_is_there() -> None:
    assert resolve_device("auto") in {"cpu", "cuda", "mps"}
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device cuda is not available on this machine; use one of"):
            resolve_device("cuda")
