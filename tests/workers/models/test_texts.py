"""Texts and conversations have the scores of transformers' own call, one by one, and are proven as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.models.conversations import exchange
from tests.harness.models.rerankers import ENCODERS, make_decoder, make_encoder
from tests.harness.tools import slow_but
from tests.workers.engine.test_engine import some_pairs

pytestmark = pytest.mark.own_precision

TEXTS = [*filter(None, some_pairs(16)[1]), "the moon", "moon river " * 60]
CHATS = [
    *(exchange(query, passage) for query, passage in zip(*some_pairs(8), strict=True)),
    [{"role": "system", "content": "Be kind."}, *exchange("why", "moon"), *exchange("so?", "tea " * 80)],
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no ' ~ m.role ~ ' here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{{ date_string or strftime_now('%Y') }}"
)


def engine(model: Path, cache: Path, budget: int = 300, **spec: Any) -> Engine:
    asked = ScoreSpec.model_validate({"model": str(model), "precision": "fp32", **spec})
    return Engine(load_proven(asked, "cpu", "torch", str(cache)).model(asked), budget)


@torch.inference_mode()
def theirs(model: Path, rows: list[dict[str, list[int]]]) -> Logits:
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    found = [network(**{name: torch.tensor([ids]) for name, ids in row.items()}).logits[0] for row in rows]
    return torch.stack(found).numpy()


def texts_of(model: Path) -> list[dict[str, list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [dict(tokenizer(text, truncation=True, max_length=64)) for text in TEXTS]


@pytest.mark.parametrize("name", slow_but(ENCODERS, "bert", "modernbert, mean"))
def test_classifiers_of_texts(name: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", name)
    wanted = theirs(model, texts_of(model))[:, 0]
    assert wanted.std() > 0.01
    for budget in (1, 300, 2000):
        scored = engine(model, tmp_path, budget, inputs="texts").score(TEXTS)
        assert scored.errors == {}
        np.testing.assert_allclose(scored.scores, wanted, atol=1e-5)


def test_all_labels_and_one_of_texts(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "roberta", labels=3)
    wanted = theirs(model, texts_of(model))
    every = engine(model, tmp_path, inputs="texts", all_labels=True).score(TEXTS).scores
    np.testing.assert_allclose(every, wanted, atol=1e-5)
    one = engine(model, tmp_path, inputs="texts", label="2", activation="softmax").score(TEXTS).scores
    np.testing.assert_allclose(one, torch.from_numpy(wanted).softmax(1).numpy()[:, 2], atol=1e-5)
    with pytest.raises(SpecError, match="no output 'spam'"):
        engine(model, tmp_path, inputs="texts", label="spam")


def test_windows_of_texts(tmp_path: Path) -> None:
    model, text = make_encoder(tmp_path / "model", "bert"), "moon river big cat " * 40
    whole = engine(model, tmp_path, inputs="texts", long="split", long_stride=20)
    assert whole.model.windows
    of, windows, _ = whole.model.windows.cut([text], None)
    assert len(of) > 3
    tokenizer = AutoTokenizer.from_pretrained(model)
    each = theirs(model, [dict(tokenizer(window, truncation=True, max_length=64)) for window in windows])[
        :, 0
    ]
    assert all(len(tokenizer.tokenize(str(window))) <= 62 for window in windows)
    np.testing.assert_allclose(whole.score([text, "cat"]).scores[0], each.max(), atol=1e-5)
    mean = engine(model, tmp_path, 100, inputs="texts", long="split-mean", long_stride=20).score(
        [text, "cat", None]
    )
    np.testing.assert_allclose(mean.scores[0], each.mean(), atol=1e-5)
    assert mean.errors == {2: "text is null"}
    assert np.isnan(mean.scores[2])


def reward_model(directory: Path, kind: str) -> Path:
    return make_decoder(directory, kind, task="classifier", template=TEMPLATE)


@pytest.mark.parametrize("kind", slow_but(("llama", "qwen2", "qwen3", "gemma2"), "qwen3"))
def test_reward_models(kind: str, tmp_path: Path) -> None:
    model = reward_model(tmp_path / "model", kind)
    tokenizer = AutoTokenizer.from_pretrained(model)
    scored = engine(model, tmp_path, inputs="conversations")
    cut = {"truncation": True, "max_length": scored.model.tokenizer.max_length}
    rows = [
        dict(tokenizer.apply_chat_template(chat, return_dict=True, date_string="26 Jul 2024", **cut))
        for chat in CHATS
    ]
    wanted = theirs(model, rows)[:, 0]
    assert wanted.std() > 0.01
    bad = [
        json.dumps([{"content": "moon"}]), "[]", "moon", json.dumps([{"role": "tool", "content": "x"}]),
        json.dumps([{"role": "user", "content": None}]), None,
        json.dumps([{"role": "\ud800", "content": "x"}]),
    ]  # fmt: skip
    found = scored.score([*map(json.dumps, CHATS), *bad])
    np.testing.assert_allclose(found.scores[: len(CHATS)], wanted, atol=1e-5)
    reasons = [found.errors[row] for row in range(len(CHATS), len(CHATS) + len(bad))]
    assert "message 0 has no role" in reasons[0]
    assert "the conversation is empty: it has no message" in reasons[1]
    assert "no tool here" in reasons[3]
    assert "message 0 has no content" in reasons[4]
    assert reasons[5] == "conversation is null"
    assert "no \ufffd here" in reasons[6]
    assert len(found.errors) == len(bad)


def test_half_of_a_character_in_a_conversation(tmp_path: Path) -> None:
    """It was an error of the tokenizer's where pairs and texts get U+FFFD."""
    scorer = engine(reward_model(tmp_path / "model", "qwen3"), tmp_path, inputs="conversations")
    half, other, whole = (
        json.dumps(exchange("why", f"a {end}")) for end in ("\ud83d", "\ufffd", "\U0001f319")
    )
    scored = scorer.score([half, other, whole])
    assert scored.errors == {}
    assert scored.scores[0] == pytest.approx(scored.scores[1], abs=1e-5)
    assert abs(scored.scores[0] - scored.scores[2]) > 1e-3


READS_LISTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(("template", "between"), [(TEMPLATE, "\n"), (READS_LISTS, "")])
def test_contents_that_are_lists_of_texts(template: str, between: str, tmp_path: Path) -> None:
    """A template that writes a content as it is wrote the list's brackets and keys, which were scored."""
    model = make_decoder(tmp_path / "model", "qwen3", task="classifier", template=template)
    parts = [{"type": "text", "text": text} for text in ("the moon", "big cat")]
    listed, plain = exchange("why", ""), exchange("why", f"the moon{between}big cat")
    listed[1]["content"] = parts
    picture = [*plain, {"role": "user", "content": [*parts, {"type": "image", "image": "moon.png"}]}]
    found = engine(model, tmp_path, inputs="conversations").score(
        [*map(json.dumps, (listed, plain, picture))]
    )
    assert found.scores[0] == pytest.approx(found.scores[1], abs=1e-6)
    assert [*found.errors] == [2]
    assert "a content is text, or a list of {type: text, text}" in found.errors[2]


def test_a_limit_that_cuts_every_answer_of_a_conversation(tmp_path: Path) -> None:
    """The template was said to drop a message, because its check cut the messages too."""
    model = reward_model(tmp_path / "model", "qwen3")
    short = engine(model, tmp_path, inputs="conversations", max_length=8)
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = [
        tokenizer.apply_chat_template(chat, return_dict=True, date_string="26 Jul 2024") for chat in CHATS
    ]
    rows = [{name: ids[:8] for name, ids in row.items()} for row in whole]
    found = short.score([*map(json.dumps, CHATS)])
    np.testing.assert_allclose(found.scores, theirs(model, rows)[:, 0], atol=1e-5)


def test_models_that_cannot_score_texts_or_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no chat template"):
        engine(make_encoder(tmp_path / "bert", "bert"), tmp_path, inputs="conversations")
    with pytest.raises(SpecError, match="scores only pairs"):
        engine(
            make_decoder(tmp_path / "causal", "qwen3", task="causal", template=TEMPLATE),
            tmp_path,
            inputs="texts",
        )
    dated = make_decoder(tmp_path / "dated", "qwen3", task="classifier", template="{{ strftime_now('%Y') }}")
    with pytest.raises(SpecError, match="writes today's date"):
        engine(dated, tmp_path, inputs="conversations")
    with pytest.raises(ValueError, match="instruction is for pairs"):
        ScoreSpec(model="demo", instruction="find", inputs="texts")


def test_labels_that_do_not_exclude_each_other_have_a_probability_each(tmp_path: Path) -> None:
    """As in transformers' own pipeline: their softmax was taken, in which a harmless text has a label."""
    model = make_encoder(tmp_path / "model", "bert", 3, problem_type="multi_label_classification")
    asked: Any = {"inputs": "texts", "all_labels": True, "activation": "probability"}
    ours = engine(model, tmp_path / "cache", **asked).score(TEXTS).scores
    pipe = pipeline("text-classification", model=str(model), top_k=None, truncation=True, max_length=64)
    found = [{label["label"]: label["score"] for label in row} for row in pipe(TEXTS)]
    expected = [[row[f"LABEL_{number}"] for number in range(3)] for row in found]
    np.testing.assert_allclose(ours, expected, atol=1e-5)
