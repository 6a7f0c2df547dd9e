"""Tokenizes pairs of texts, and cuts long passages into windows."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
from tokenizers import Tokenizer

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import Side
from rankmill.workers.batches.planner import Rows
from rankmill.workers.batches.tokens import Ids, TokenIds, Tokens, ends, in_a_row, pieces_of
from rankmill.workers.models.fast_texts import FastTexts

logger = logging.getLogger(__name__)


class Tokenize(Protocol):
    """Tokenizes pairs of texts ``[n]``; ``pad_id`` is the token that pads a batch.

    A text that is scored by itself counts as a pair without a passage, and so does a conversation. ``texts``
    tokenizes single texts, if the model's rows are made of these.
    """

    max_length: int
    pad_id: int
    texts: FastTexts | None

    def __call__(self, queries: Sequence[str], passages: Sequence[str] | None = None) -> Tokens:
        """Tokenize pairs ``[n]``; without `passages`, the queries are texts that are scored by themselves."""
        ...


class PairTokenizer:
    """A Hugging Face tokenizer for pairs, with the truncation of sentence-transformers.

    Parameters
    ----------
    tokenizer
        Any `transformers.PreTrainedTokenizerBase`.
    max_length
        Longest pair in tokens, special tokens included; the longer text is cut first.
    joiner
        The tokenizer's `Joiner`, if it has one.
    side
        The side at which texts are cut; ``None`` leaves it to the tokenizer's files.
    prompt
        The text before each query, as `CrossEncoder` puts it for a model without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        joiner: Joiner | None,
        side: Side | None = None,
        prompt: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.pad_id = tokenizer.pad_token_id or 0  # any id works, because padding is masked
        self._joiner = joiner if joiner and joiner.specials < max_length else None
        self._side: Side = side or tokenizer.truncation_side
        self._prompt = prompt
        self.texts: FastTexts | None = self._joiner.texts if self._joiner else None

    def __call__(self, queries: Sequence[str], passages: Sequence[str] | None = None) -> Tokens:
        if self._prompt:
            queries = [self._prompt + query for query in queries]
        if self._joiner and set(map(type, chain(queries, passages or ()))) <= {str}:
            return self._joiner.tokenize(queries, passages, self.max_length, self._side)
        return tokenize_pairs(self._tokenizer, queries, passages, self.max_length, self._side)


class ShortPassages:
    """Cuts each passage to the ``max_passage_tokens`` of the spec.

    Parameters
    ----------
    tokenizer
        The Hugging Face tokenizer, which tells where tokens end in a text.
    most
        The limit on a passage's tokens.

    Raises
    ------
    SpecError
        The tokenizer does not tell where its tokens are in a text.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self._texts = texts_with_places(tokenizer, "max_passage_tokens", "max_passage_tokens")
        self._most = most

    def cut(self, passages: Sequence[str]) -> list[str]:
        encodings = self._texts.encode_batch(list(passages), add_special_tokens=False)
        return [
            passage if len(encoding) <= self._most else self._beginning(passage, encoding.offsets)
            for passage, encoding in zip(passages, encodings, strict=True)
        ]

    def _beginning(self, passage: str, spans: Sequence[tuple[int, int]]) -> str:
        """Cut a passage so that the result has at most `most` tokens by itself.

        The result may have fewer tokens, even none: one character can be several tokens.
        """
        for kept in range(self._most, 0, -1):
            short = passage[: spans[kept - 1][1]]
            if len(self._texts.encode(short, add_special_tokens=False)) <= self._most:
                return short
        return ""


def tokenize_pairs(
    tokenizer: Any,
    queries: Sequence[str],
    passages: Sequence[str] | None,
    max_length: int,
    side: Side | None = None,
) -> Tokens:
    """Tokenize pairs ``[n]`` with the Hugging Face tokenizer itself, each pair as a whole."""
    own = tokenizer.truncation_side
    tokenizer.truncation_side = side or own
    try:
        encoded = tokenizer(
            list(queries),
            None if passages is None else list(passages),
            truncation="longest_first",
            max_length=max_length,
            padding=False,
            return_attention_mask=False,
        )
    finally:
        tokenizer.truncation_side = own
    types = encoded.get("token_type_ids")
    return replace(in_a_row(encoded["input_ids"]), types=None if types is None else in_a_row(types).ids)


class Joiner:
    """Tokenizes each distinct text only once, and makes the token ids of a pair from those of its two texts.

    Parameters
    ----------
    texts
        Tokenizes single texts, without special tokens and truncation.
    pattern, types
        Token ids and types of a pair or of a single text, with one placeholder token for each text. ``types``
        is ``None`` for models without types.
    places
        Positions of the placeholders in the pattern.
    """

    def __init__(
        self, texts: FastTexts, pattern: TokenIds, types: TokenIds | None, places: list[int]
    ) -> None:
        self.texts = texts
        self._pattern = pattern
        self._types = types
        self._places = places
        self.specials = len(pattern) - len(places)

    @classmethod
    def of(cls, tokenizer: Any, cache: Path | None = None, *, alone: bool = False) -> Joiner | None:
        """Make a `Joiner` that gives the same tokens as a Hugging Face tokenizer.

        If none can be made, or if the tokens of a sample text differ, log a line and return ``None``.

        Parameters
        ----------
        tokenizer
            The Hugging Face tokenizer.
        cache
            Cache folder; ``None`` means that no fast tokenizer library is used.
        alone
            Whether to tokenize single texts instead of pairs.
        """
        try:
            joiner = cls._guess(tokenizer, cache, ["b"] if not alone else None)
            if joiner._agrees_with(tokenizer):
                return joiner
            why = "a text by itself gets other tokens than in its pair"
        except Exception as error:  # for example, the tokenizer is not in Rust
            why = f"{type(error).__name__}: {error}"
        logger.info("each pair is tokenized as a whole, which is slower: %s", why)
        return None

    @classmethod
    def _guess(cls, tokenizer: Any, cache: Path | None, passage: list[str] | None) -> Joiner:
        sample = tokenizer(["a"], passage)
        texts = sample.encodings[0].sequence_ids  # each token's text, 0 or 1; None for a special token
        keep = [at for at, text in enumerate(texts) if text is None or text not in texts[:at]]
        order = [texts[at] for at in keep]
        ids, types = (sample.get(name) for name in ("input_ids", "token_type_ids"))
        return cls(
            FastTexts(single_texts(tokenizer), cache),
            np.array(ids[0], np.int32)[keep],
            None if types is None else np.array(types[0], np.int32)[keep],
            [order.index(0)] if passage is None else [order.index(0), order.index(1)],
        )

    def _agrees_with(self, tokenizer: Any) -> bool:
        queries, both = sample_pairs(tokenizer)
        passages = both if len(self._places) == 2 else None
        for length, side in product([*range(self.specials + 1, self.specials + 6), 512], get_args(Side)):
            ours = self.tokenize(queries, passages, length, side)
            theirs = tokenize_pairs(tokenizer, queries, passages, length, side)
            for name in ("ids", "types", "offsets"):
                if not np.array_equal(getattr(ours, name), getattr(theirs, name)):
                    return False
        return True

    def tokenize(
        self, queries: Sequence[str], passages: Sequence[str] | None, max_length: int, side: Side = "right"
    ) -> Tokens:
        """Tokenize pairs ``[n]``, truncated to `max_length` tokens at one side of the texts."""
        columns = [queries] if passages is None else [queries, passages]
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__  # a new text gets the next number
        rows = (np.fromiter(map(numbers.__getitem__, column), np.int64, len(column)) for column in columns)
        pairs = np.stack(list(rows))
        texts = self.texts(list(numbers))
        lengths = longest_first(texts.lengths[pairs], max_length - self.specials)
        return self._join(texts, pairs, lengths, side)

    def _join(self, texts: Tokens, pairs: Ids, truncated: Ids, side: Side) -> Tokens:
        """Make the token ids of pairs: in a pair's pattern, the tokens of a text replace each placeholder.

        Parameters
        ----------
        texts
            The tokens of the distinct texts.
        pairs
            Indices of each pair's texts, ``[2, n]``, or ``[1, n]`` for single texts.
        truncated
            How many tokens of each text are used, in the shape of `pairs`.
        side
            The side at which texts are cut.
        """
        width, count = len(self._pattern), pairs.shape[1]
        numbers = np.concatenate([self._pattern, texts.ids])
        offsets = np.concatenate([np.arange(width), width + texts.offsets])
        # `which` has the numbers of a row's parts: each token of the pattern has a number, then each text
        which = np.tile(np.arange(width), (count, 1))
        which[:, self._places] = width + pairs.T
        lengths = np.ones_like(which)
        lengths[:, self._places] = truncated.T
        starts = offsets[which]
        if side == "left":
            starts[:, self._places] += (texts.lengths[pairs] - truncated).T
        return Tokens(
            ids=pieces_of(numbers, starts.ravel(), lengths.ravel()),
            types=None if self._types is None else np.repeat(np.tile(self._types, count), lengths.ravel()),
            offsets=ends(lengths.sum(axis=1)),
        )


def sample_pairs(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Queries and passages ``[n]`` that are likely to show a difference between two tokenizers."""
    special = "".join(tokenizer.all_special_tokens[:8])
    samples = ["", "a", " É\n你½", f"B{special}, {special} b ", "a " * 9, "b " * 11]
    queries, passages = zip(*product(samples, samples), strict=True)
    return list(queries), list(passages)


def longest_first(lengths: Ids, room: int) -> Ids:
    """Return how many tokens of each text are left if the longer text of each pair is cut first.

    Parameters
    ----------
    lengths
        Numbers of tokens before the texts are cut, ``[2, n]``, or ``[1, n]`` for single texts.
    room
        After the cut, the texts of a pair have at most this many tokens together.
    """
    if len(lengths) == 1:
        return np.minimum(lengths, room)
    first, second = lengths
    shorter = np.minimum(np.minimum(first, second), room // 2)
    longer = np.minimum(np.maximum(first, second), room - shorter)
    swap = first > second  # of two equally long texts, the second keeps the odd token
    return np.where(swap, [longer, shorter], [shorter, longer])


def single_texts(tokenizer: Any) -> Tokenizer:
    """Make a tokenizer like the Rust part of `tokenizer`, without truncation and special tokens.

    The tokenizer is not copied by JSON: the scores of a Unigram model would lose their last digit, so that
    tokens could change.
    """
    whole = tokenizer.backend_tokenizer
    single = Tokenizer(whole.model)
    single.normalizer = whole.normalizer
    single.pre_tokenizer = whole.pre_tokenizer
    added = whole.get_added_tokens_decoder()
    single.add_tokens([token for _, token in sorted(added.items())])
    if single.get_added_tokens_decoder() != added:
        raise ValueError("added tokens get other ids when they are added again")
    single.encode_special_tokens = tokenizer.split_special_tokens
    return single


def texts_with_places(tokenizer: Any, option: str, wanted: str) -> Tokenizer:
    """Make a tokenizer of single texts that tells where each token is in its text.

    If it cannot be made, raise a `SpecError` about the field `option` and the feature `wanted`.
    """
    try:
        return single_texts(tokenizer)
    except (AttributeError, ValueError) as error:
        why = f"its tokenizer cannot cut passages for {wanted} ({error})"
        raise SpecError(why, option=option) from error


class Windows:
    """Cuts long passages into windows, each of which fits into the model's length.

    Parameters
    ----------
    tokenizer
        The Hugging Face tokenizer, which tells where tokens begin in a text.
    tokenize
        The tokenizer of pairs, with its limit on the length.
    stride
        At most this many tokens lie between the starts of two successive windows; ``None`` means half of a
        window.

    Raises
    ------
    SpecError
        The tokenizer does not tell where its tokens are in a text.
    """

    def __init__(self, tokenizer: Any, tokenize: Tokenize, stride: int | None) -> None:
        self._texts = texts_with_places(tokenizer, "long", "long split")
        self._tokenize, self._stride = tokenize, stride

    def cut(
        self, queries: Sequence[str], passages: Sequence[str] | None
    ) -> tuple[Rows, list[str], list[str] | None]:
        """Cut the passages of pairs ``[n]`` into windows, each of which makes a new pair with its query.

        A passage that fits stays whole. If the query leaves a passage less than a quarter of the model's
        length, the passage also stays whole, and is truncated later. Without `passages`, the texts in
        `queries` are cut.

        Returns
        -------
        For each new pair: the index of the pair that it comes from, its query, and its passage. Without
        `passages`, the windows are in place of the queries, and there are no passages (``None``).
        """
        questions, long_texts = ([""] * len(queries), queries) if passages is None else (queries, passages)
        distinct = list(dict.fromkeys(questions))
        nothing = None if passages is None else [""] * len(distinct)
        taken = self._tokenize(distinct, nothing).lengths.tolist()
        limit = self._tokenize.max_length
        rooms = {query: limit - used for query, used in zip(distinct, taken, strict=True)}
        rows: list[int] = []
        texts: list[str] = []
        encodings = self._texts.encode_batch(list(long_texts), add_special_tokens=False)
        for row, (query, passage, encoding) in enumerate(zip(questions, long_texts, encodings, strict=True)):
            room, spans = rooms[query], encoding.offsets
            whole = len(spans) <= room or room < limit // 4
            parts = [passage] if whole else self._parts(passage, spans, room)
            rows += [row] * len(parts)
            texts += parts
        of = np.asarray(rows, np.intp)
        return (of, texts, None) if passages is None else (of, [queries[row] for row in rows], texts)

    def _parts(self, passage: str, spans: Sequence[tuple[int, int]], room: int) -> list[str]:
        step = min(self._stride or max(room // 2, 1), room)
        last = len(spans) - room
        starts = [*range(0, last, step), last]  # so that the last window is as long as the others
        return [passage[spans[start][0] : spans[start + room - 1][1]] for start in starts]
