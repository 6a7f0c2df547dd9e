"""Texts are read to their end, however long they are: only the tokenizer knows what a model reads of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankmill import Client
from rankmill.jobs.contract.spec import SpecOptions
from rankmill.jobs.contract.wire import MAX_TEXT_CHARS
from tests.conftest import Server, StartWorker
from tests.harness.models.rerankers import make_decoder

pytestmark = pytest.mark.own_precision

SPACES = " " * (1 << 20)
"""They have no tokens, so a long text of them is tokenized quickly."""

PASSAGE = "the moon is far " * 50 + "and the cat drinks tea"
LONG = PASSAGE.replace(" and", SPACES + "and")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"


def test_a_long_text_is_scored_as_one_without_its_spaces(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    workers()
    client = Client(server.url, model=str(tiny_model), precision="fp32")
    ways: list[SpecOptions] = [{}, {"truncation_side": "left"}, {"long": "split"}, {"long": "split-mean"}]
    ways.append({"max_passage_tokens": 300, "truncation_side": "left"})
    for options in ways:
        pairs = [("how far", PASSAGE), (PASSAGE, "tea"), ("how far", LONG), (LONG, "tea")]
        scores = client.score(pairs, **options)
        np.testing.assert_allclose(scores[2:], scores[:2], atol=1e-5, err_msg=str(options))
    reward = make_decoder(tmp_path / "reward", "qwen2", task="classifier", template=TEMPLATE)
    chats = [[{"role": "user", "content": text}] for text in ("tea", SPACES * 2 + "tea")]
    short, long = client.score(messages=chats, model=str(reward), all_labels=True)
    np.testing.assert_allclose(long, short, atol=1e-5)


def test_a_text_that_is_too_long_is_only_its_own_row_s_error(
    server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    workers()
    client = Client(server.url, model=str(tiny_model), precision="fp32", activation="identity")
    most = f"the passage is too long, {MAX_TEXT_CHARS:,} characters are taken: shorten it"
    pairs = [("tea", "a cat"), ("tea", "ä" * (MAX_TEXT_CHARS + 1)), ("tea", " " * MAX_TEXT_CHARS)]
    scores = client.score(pairs)
    assert scores.errors == {1: most}
    assert np.isfinite(scores[[0, 2]]).all()
