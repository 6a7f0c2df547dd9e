"""Pairs joined from texts that were tokenized alone are what the tokenizer makes of the pairs."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from rankmill.jobs.contract.spec import Side
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.models.fast_texts import FastTexts
from rankmill.workers.models.tokenizer import Joiner, PairTokenizer, ShortPassages, tokenize_pairs

LINES = Path(__file__).read_text().splitlines()
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@cache
def word_pieces() -> dict[str, int]:
    pieces = [*SPECIAL, "<sep>", "<cls>", *string.printable, "the", "moon", "pair", "é", "你"]
    pieces += [f"##{piece}" for piece in string.ascii_lowercase + string.digits]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def trained(model: models.Model, trainer: trainers.Trainer, splits: pre_tokenizers.PreTokenizer) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splits
    tokenizer.train_from_iterator(LINES, trainer)
    return json.loads(tokenizer.to_str())["model"]


@cache
def byte_pairs() -> dict[str, Any]:
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model = trained(models.BPE(), trainer, pre_tokenizers.ByteLevel())
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


@cache
def unigrams() -> dict[str, Any]:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    model = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    return {"vocab": [tuple(piece) for piece in model["vocab"]]}


def template(pair: str, *, types: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with a template of its own."""
    tokenizer = Tokenizer(models.WordPiece(word_pieces(), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair=pair, special_tokens=[(token, word_pieces()[token]) for token in SPECIAL]
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", model_input_names=names)


def family(name: str, parts: Callable[[], dict[str, Any]], **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}Tokenizer")(**parts(), **options)


def words() -> dict[str, Any]:
    return {"vocab": word_pieces()}


FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": family("Bert", words),
    "bert, cased": family("Bert", words, do_lower_case=False),
    "bert, special tokens are split": family("Bert", words, split_special_tokens=True),
    "mpnet": family("MPNet", words),
    "funnel": family("Funnel", words),
    "roberta": family("Roberta", byte_pairs),
    "roberta, prefix space": family("Roberta", byte_pairs, add_prefix_space=True),
    "deberta": family("Deberta", byte_pairs),
    "gpt2": family("GPT2", byte_pairs),
    "qwen2": family("Qwen2", byte_pairs),
    "xlm-roberta": family("XLMRoberta", unigrams),
    "camembert": family("Camembert", unigrams),
    "deberta-v2": family("DebertaV2", unigrams),
    "albert": family("Albert", unigrams),
    "xlnet": family("XLNet", unigrams, truncation_side="right"),
    "t5": family("T5", unigrams),
    "big_bird": family("BigBird", unigrams),
    "modernbert": partial(template, "[CLS] $A [SEP] $B [SEP]", types=False),
    "types of all kinds": partial(template, "[CLS]:3 $A:1 [SEP]:0 <s>:2 $B:4"),
    "the second first": partial(template, "[CLS] $B [SEP] $A"),
    "nothing between": partial(template, "$A $B:1"),
    "cut at the left": family("Bert", words, truncation_side="left"),
}


@cache
def tokenizer_of(name: str) -> Any:
    return FAMILIES[name]()


@cache
def joiner_of(name: str) -> Joiner | None:
    return Joiner.of(tokenizer_of(name))


def pair_tokenizer(name: str, max_length: int, side: Side | None = None) -> PairTokenizer:
    return PairTokenizer(tokenizer_of(name), max_length, joiner_of(name), side)


def check(ours: Tokens, theirs: Tokens) -> None:
    for name in ("ids", "types", "offsets"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        np.testing.assert_array_equal(found, expected)
        assert found is None or found.dtype == expected.dtype


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_that_join_are_recognized(name: str) -> None:
    assert joiner_of(name) is not None


LONG = "the moon " * 99
ODD = [" ", "\t", "the moon", "Pair,", " the", "ﬁ½é", "e\u0301", "你好", "🌙\u200d", "the moon " * 12]
PIECES = st.one_of(st.text(max_size=20), st.sampled_from([*SPECIAL, *ODD]), st.text("a", max_size=60))
TEXTS = st.lists(PIECES, max_size=6).map("".join)


@st.composite
def pairs_of_texts(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Few texts in many pairs."""
    some = st.sampled_from(draw(st.lists(TEXTS, min_size=1, max_size=6)))
    return draw(st.lists(st.tuples(some, some), min_size=1, max_size=10))


@given(
    pairs=pairs_of_texts(),
    max_length=st.one_of(st.integers(1, 20), st.just(128)),
    side=st.sampled_from([None, "left", "right"]),
)
@example(pairs=[("", ""), ("a", ""), ("", "a")], max_length=5, side=None)
@example(pairs=[(LONG, LONG), ("a", LONG), (LONG, "")], max_length=128, side="left")
@settings(max_examples=100)
def test_pairs_are_those_of_the_tokenizer(
    pairs: list[tuple[str, str]], max_length: int, side: Side | None
) -> None:
    """Of each family. Few texts are long: the tokenizer makes an object of each part that it cuts off."""
    queries, passages = zip(*pairs, strict=True)
    for name in FAMILIES:
        note(name)
        expected = tokenize_pairs(tokenizer_of(name), queries, passages, max_length, side)
        check(pair_tokenizer(name, max_length, side)(queries, passages), expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "gpt2", "the second first"])
def test_a_side_is_that_of_a_tokenizer_whose_files_name_it(name: str, side: Side) -> None:
    queries, passages = ["the moon, the pair", "a", LONG], [LONG, "é the pair " * 20, "pair the moon " * 20]
    whole = FAMILIES[name]()
    whole.truncation_side = side
    theirs = whole(queries, passages, truncation="longest_first", max_length=16)
    ours = pair_tokenizer(name, 16, side)(queries, passages)
    assert [row.tolist() for row in np.split(ours.ids, ours.offsets[1:-1])] == theirs["input_ids"]
    assert tokenizer_of(name).truncation_side == "right"


@pytest.mark.parametrize("max_length", range(4, 21))
def test_the_longer_text_is_cut_as_the_tokenizer_cuts_it(max_length: int) -> None:
    counts = [(first, second) for first in range(13) for second in range(13)]
    queries, passages = (["the " * count for count in column] for column in zip(*counts, strict=True))
    expected = tokenize_pairs(tokenizer_of("bert"), queries, passages, max_length)
    check(pair_tokenizer("bert", max_length)(queries, passages), expected)


def test_scores_of_pieces_are_those_of_the_tokenizer_to_the_last_digit() -> None:
    """In a copy by way of JSON these scores are others, and many of the texts are cut otherwise."""
    scores = [-1.4754928772887919, -5.179951098649205, -6.454698717106705, -8.082525703194417]
    scores += [-2.2706065859968017, -17.760706635936298]
    pieces = [(token, 0.0) for token in [*SPECIAL, "▁"]]
    pieces += [("a" * length, score) for length, score in enumerate(scores, 1)]
    tokenizer = transformers.XLMRobertaTokenizer(vocab=pieces)
    texts = ["a" * count for count in range(120)]
    expected = tokenize_pairs(tokenizer, texts, texts[::-1], 512)
    check(PairTokenizer(tokenizer, 512, Joiner.of(tokenizer))(texts, texts[::-1]), expected)


@pytest.mark.parametrize("side", [None, "left"])
def test_what_cannot_be_joined_is_left_to_the_tokenizer(side: Side | None) -> None:
    whole = template("[CLS] $A [SEP] $A $B")
    joiner = Joiner.of(whole)
    assert joiner is None
    queries, passages = ["the moon", "a"], ["the moon " * 9, "b c"]
    expected = tokenize_pairs(whole, queries, passages, 12, side)
    check(PairTokenizer(whole, 12, joiner, side)(queries, passages), expected)


def test_a_tokenizer_that_first_cuts_each_text_is_left_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    """As tokenizers 0.23.1 and 0.23.2 do with texts without special tokens: the odd token is the second's."""

    class CutsEachText(transformers.BertTokenizer):  # type: ignore[misc]
        def __call__(self, queries: list[str], passages: list[str], **options: Any) -> Any:
            most = options.get("max_length") or 1000
            columns = [[_cut(text, most) for text in column] for column in (queries, passages)]
            return super().__call__(*columns, **options)

    def _cut(text: str, most: int) -> str:
        special = any(each in text for each in SPECIAL)
        return text if special or len(text.split()) <= most else " ".join(text.split()[:most])

    cuts = FAMILIES["bert"]()
    assert Joiner.of(cuts) is not None
    cuts.__class__ = CutsEachText
    with caplog.at_level("INFO"):
        assert Joiner.of(cuts) is None
    assert "each pair is tokenized as a whole" in caplog.text


@given(passages=st.lists(TEXTS, min_size=1, max_size=4), most=st.integers(1, 12))
@example(passages=["🌙\u200d🌙"], most=2)
@settings(max_examples=100)
def test_a_passage_is_cut_to_its_own_tokens(passages: list[str], most: int) -> None:
    for name in ("bert", "gpt2", "xlm-roberta"):
        note(name)
        tokenizer = tokenizer_of(name)
        whole = tokenizer(passages, add_special_tokens=False)["input_ids"]
        short = ShortPassages(tokenizer, most).cut(passages)
        ids = tokenizer(short, add_special_tokens=False)["input_ids"]
        for passage, cut, own, left in zip(passages, short, whole, ids, strict=True):
            assert passage.startswith(cut)
            assert cut == passage if len(own) <= most else len(left) <= most


def test_words_are_cut_to_their_first_tokens() -> None:
    tokenizer = tokenizer_of("bert")
    (short,) = ShortPassages(tokenizer, 5).cut(["the moon the pair the moon"])
    ids = tokenizer(["the moon the pair the moon", short], add_special_tokens=False)["input_ids"]
    assert ids[1] == ids[0][:5]


def test_a_tokenizer_in_python_is_left_to_itself(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(list(word_pieces())))
    tokenizer = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    joiner = Joiner.of(tokenizer)
    assert joiner is None
    assert len(PairTokenizer(tokenizer, 8, joiner)(["the moon"], ["the the the moon"]).ids) == 8


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", None, 7, ("two", "texts"), ["a", "list"]])
@pytest.mark.parametrize("column", [0, 1])
def test_what_is_no_text_raises(text: Any, column: int) -> None:
    columns: list[Sequence[Any]] = [["a", "b"], ["a", "b"]]
    columns[column] = ["a", text]
    with pytest.raises((TypeError, ValueError)):
        pair_tokenizer("bert", 128)(*columns)


def test_columns_must_have_the_same_length() -> None:
    with pytest.raises(ValueError, match="shape"):
        pair_tokenizer("bert", 128)(["a", "b"], ["a"])


def test_no_pairs_at_all() -> None:
    assert len(pair_tokenizer("bert", 128)([], []).lengths) == 0


def test_each_text_is_tokenized_once() -> None:
    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            assert sorted(texts) == ["a", "b", "q"]
            return tokenizer_of("bert").backend_tokenizer.encode_batch_fast(texts, **options)

    joiner = Joiner.of(tokenizer_of("bert"))
    assert joiner is not None
    joiner.texts = FastTexts(Counting(), None)  # type: ignore[arg-type]
    assert joiner.tokenize(["q", "q", "q", "q"], ["a", "b", "a", "q"], 128).lengths.tolist() == [5] * 4


def test_one_tokenizer_serves_several_lengths_and_threads_at_once() -> None:
    tokenizer = family("Bert", words)()
    queries, passages = ["the moon", "a pair"] * 50, ["the moon and the pair " * 9] * 100
    lengths = [2, 8, 16, 32, 64] * 6  # 2 is left to the tokenizer, which sets its truncation
    expected = {length: tokenize_pairs(tokenizer, queries, passages, length) for length in set(lengths)}
    joiner = Joiner.of(tokenizer)
    made = {length: PairTokenizer(tokenizer, length, joiner) for length in expected}
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda length: made[length](queries, passages), lengths))
    for length, tokens in zip(lengths, found, strict=True):
        check(tokens, expected[length])
