"""Texts have the tokens of transformers' own call, uncut, and tokens their text; a bad row stands alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine import work as work_module
from rankmill.workers.engine.work import Work, encode
from rankmill.workers.models.encoder import TextEncoder
from rankmill.workers.models.loading import Model, load_model
from rankmill.workers.models.sources import DEMO_MODEL
from tests.harness.models.rerankers import make_decoder, make_encoder

TEXTS = ["", "big cat", " É\n你½ 🌕 ", "moon river " * 90, "a [SEP] b </s>"]


@pytest.fixture(params=["demo", "bert", "roberta", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "demo":
        return Path(DEMO_MODEL)
    if request.param == "qwen3":
        return make_decoder(tmp_path / "model", "qwen3", task="classifier", template=None)
    return make_encoder(tmp_path / "model", request.param)


def loaded(model: Path, cache: Path) -> Model:
    asked = ScoreSpec(model=str(model), precision="fp32", inputs="tokens")
    return load_model(asked, "cpu", "torch", str(cache))


def found_in(work: Work) -> list[TokensFound | None]:
    assert work.found is not None
    assert not work.left  # there is no forward
    return [None if each is None else TokensFound.read_json(each, "it") for each in work.found]


@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_those_of_transformers(model: Path, tmp_path: Path, special: bool) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(model)
    tokenizing = loaded(model, tmp_path)
    work = encode(tokenizing, [TokensAsked(text=text, special=special).written() for text in TEXTS])
    rows = []
    for text, found, count in zip(TEXTS, found_in(work), work.scored.scores, strict=True):
        assert found
        wanted = theirs(text, add_special_tokens=special, return_offsets_mapping=True,
                        return_special_tokens_mask=True)  # fmt: skip
        assert list(found.ids) == wanted["input_ids"]
        assert len(found.ids) == count
        assert list(found.words) == theirs.convert_ids_to_tokens(wanted["input_ids"])
        assert list(found.special) == list(map(bool, wanted["special_tokens_mask"]))
        assert list(found.spans) == wanted["offset_mapping"]
        rows.append(found.ids)
    back = encode(tokenizing, [TokensAsked(ids=ids, special=special).written() for ids in rows])
    for ids, found in zip(rows, found_in(back), strict=True):
        assert found
        assert found.text == theirs.decode(ids, skip_special_tokens=not special)
    assert work.scored.tokens == sum(map(len, rows))


def test_a_row_that_asks_for_nothing_is_no_other_rows_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = TokensAsked(text="big cat", special=True).written()
    rows = [
        good,
        '{"text": null, "ids": null, "special": true, "about": false}',
        None,
        '{"text": "a", "ids": [1], "special": true, "about": false}',
        "no JSON",
        good,
    ]
    work = encode(loaded(DEMO_MODEL, tmp_path), rows)
    assert sorted(work.scored.errors) == [1, 2, 3, 4]
    assert "either a text or ids" in work.scored.errors[1]
    assert np.isnan(work.scored.scores).tolist() == [False, True, True, True, True, False]
    # What no result can hold is an error too: the worker that wrote it would die of it.
    monkeypatch.setattr(work_module, "_MOST_FOUND", len(str(found_in(work)[0])))
    again = encode(loaded(DEMO_MODEL, tmp_path), [good] * 5)
    assert again.scored.errors[4] == "tokenizer: there are too many tokens for one result"
    assert 0 not in again.scored.errors


def test_a_tokenizer_without_places_is_one_line() -> None:
    encoder = TextEncoder(object(), 10, ("relevant",))
    with pytest.raises(ValueError, match="does not tell where its tokens are"):
        encoder([TokensAsked(text="a", special=True).written()])
    (found,) = encoder([TokensAsked(text="", special=False, about=True).written()])
    assert (found.most, found.labels, found.ids) == (10, ("relevant",), ())


def test_what_is_found_is_checked() -> None:
    text = '{"text": "", "ids": [1, 2], "words": ["a"], "special": [false], "spans": [[0, 1]], "most": 9'
    with pytest.raises(WireError, match="differ in length"):
        TokensFound.read_json(f'{text}, "labels": []}}', "it")
