"""Proves that a fast tokenizer gives the same ids as Hugging Face's."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from rankmill.workers.batches.tokens import TokenIds, Tokens, ends

_PLANES = (0, 1, 2, 3, 14)
"""Planes of Unicode that have characters of general use."""

CODES = [code for plane in _PLANES for code in range(plane << 16, (plane + 1) << 16)]
"""Code points for which the fast tokenizer library is compared with Hugging Face's, except surrogates. A text
with another code point never goes to the fast library.
"""

_MOST_DIFFERENT = 256
"""The fast tokenizer library may give wrong ids for at most this many characters, and for no ASCII character.
Otherwise the library is not used. Texts with such characters go to Hugging Face's tokenizer.
"""

_CONTEXTS = ("{0}", "a{0}b{0}{0}1", "e{0}\u0301 .{0} A")
_SPACE_BYTE = "\u0120"
"""The character that stands for a space in byte-level vocabularies."""

_SIGNS = (" ", "\n", "\t", "\u00a0", "\u3000", ".", ", ", "'s", "-", "1999", "$3.50", "\r\n")
RANDOM_TEXTS, LONG_TEXTS = 4000, 4

FastEncode = Callable[[list[str]], tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""Returns the ids of texts, end to end, and the offsets at which each text's ids begin and end."""

logger = logging.getLogger(__name__)


class Untrusted(Exception):
    """A fast tokenizer library does not give the ids of Hugging Face's tokenizer, or cannot be used."""


def slow_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """Tokenize texts with Hugging Face's tokenizer."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    flat = chain.from_iterable(map(attrgetter("ids"), encodings))
    return Tokens(np.fromiter(flat, np.int32, int(lengths.sum())), None, ends(lengths))


def fast_tokens(fast: FastEncode, texts: list[str]) -> Tokens:
    """Tokenize texts with a fast tokenizer library. Raises `Untrusted` if the library's offsets do not fit
    the texts.
    """
    ids, given = fast(texts)
    offsets = given.astype(np.int64, copy=False)
    is_whole = len(offsets) == len(texts) + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    if not is_whole or (np.diff(offsets) < 0).any():
        raise Untrusted(f"{len(offsets)} offsets for {len(texts)} texts")
    return Tokens(ids.astype(np.int32), None, offsets)


def row(tokens: Tokens, place: int) -> TokenIds:
    """Return the token ids of the text at the index `place`."""
    return tokens.ids[tokens.offsets[place] : tokens.offsets[place + 1]]


def described(text: str) -> str:
    """Describe a text by its length and some of its characters, without revealing the text."""
    codes = sorted({f"U+{ord(character):04X}" for character in text if not character.isascii()})
    return f"a text of {len(text)} characters, among them {', '.join(codes[:20]) or 'none but ASCII'}"


def prove_tokenizer(slow: Tokenizer, fast: FastEncode) -> list[tuple[int, int]]:
    """Compare two tokenizers; returns the ranges of the code points on which they agree.

    Raises
    ------
    Untrusted
        The tokenizers differ on an ASCII character, on more than a few other characters, or on a sample text.
    """
    points = np.array([code for code in CODES if not 0xD800 <= code < 0xE000])
    same = np.ones(len(points), np.bool_)
    for start in range(0, len(points), 1 << 14):
        some = [chr(code) for code in points[start : start + (1 << 14)]]
        for context in _CONTEXTS:
            same[start : start + len(some)] &= _agree(slow, fast, [context.format(sign) for sign in some])
    if not same[:128].all() or (count := int((~same).sum())) > _MOST_DIFFERENT:
        raise Untrusted(f"other ids for {int((~same).sum()):,} of {len(points):,} characters")
    alike = "".join(map(chr, points[same]))
    texts = [*_with_added(slow), *_random_texts(_words(slow), alike)]
    if not (agree := _agree(slow, fast, texts)).all():
        raise Untrusted(f"other ids for {described(texts[int(np.argmin(agree))])}")
    if count:
        logger.warning("%d characters have other ids there: texts with them go to tokenizers", count)
    return _ranges(points[same])


def _agree(slow: Tokenizer, fast: FastEncode, texts: list[str]) -> npt.NDArray[np.bool_]:
    ours, theirs = fast_tokens(fast, texts), slow_tokens(slow, texts)
    if np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids):
        return np.ones(len(texts), np.bool_)
    rows = (np.array_equal(row(ours, place), row(theirs, place)) for place in range(len(texts)))
    return np.fromiter(rows, np.bool_, len(texts))


def _with_added(slow: Tokenizer) -> Iterator[str]:
    """Make texts that contain the added tokens of a tokenizer, in several contexts."""
    for added in list(slow.get_added_tokens_decoder().values())[:_MOST_DIFFERENT]:
        content = added.content
        yield from (content, f"a{content}b", f"a {content} b", f"{content}{content}", f" {content[:-1]}")
        yield from (content.lower(), content.upper())


def _words(slow: Tokenizer) -> list[str]:
    """Return the entries of a tokenizer's vocabulary as text."""
    words = sorted(slow.get_vocab())
    if _SPACE_BYTE not in words:
        return words
    written = ByteLevel()
    return [written.decode([word]) for word in words]


def _random_texts(words: list[str], characters: str) -> Iterator[str]:
    """Make pseudo-random texts of words and of characters of all scripts, the long ones last.

    Each call makes the same texts.
    """
    chance = random.Random(0)  # noqa: S311 (no secret)
    near = [characters[start : start + 256] for start in range(0, len(characters), 256)]

    def piece() -> str:
        kind = chance.random()
        if kind < 0.6:
            return chance.choice(words).removeprefix("##") + chance.choice(["", " ", " ", "  "])
        if kind < 0.8:
            return chance.choice(_SIGNS)
        if kind < 0.9:
            return "".join(chance.choices(chance.choice(near), k=chance.randrange(1, 9)))
        return "".join(chance.choices(characters, k=chance.randrange(1, 4)))

    for number in range(RANDOM_TEXTS):
        text = "".join(piece() for _ in range(chance.randrange(1, 60)))
        yield text.title() if number % 5 == 0 else text
    # WordPiece cuts a word into pieces only up to a length, usually of 100 characters
    for length in (99, 100, 101, 200, 5000):
        yield "a" * length
        yield "é" * length
    for _ in range(LONG_TEXTS):
        yield "".join(piece() for _ in range(20_000))


def _ranges(points: npt.NDArray[Any]) -> list[tuple[int, int]]:
    cuts = np.flatnonzero(np.diff(points) > 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(points, cuts)]
