"""Fast tokenizer libraries, which replace Hugging Face's if they are proven to give the same ids.

Hugging Face's tokenizer costs at least 90 µs of CPU for a pair, and a GPU waits for the tokens. The fast
libraries, `nanotoken` (for WordPiece) and `fastokens` (for byte pairs), cost a twentieth of that, but are
young. A model's tokenizer is therefore proven before a fast library replaces it: a thread compares the ids of
the fast library with those of Hugging Face's tokenizer. For a GPU the proof begins when the model is loaded,
and for a CPU when tokenizing has taken as long as a proof does. The result is kept in the cache folder for
all workers of this host.

After the proof, a text with an unproven character still goes to Hugging Face's tokenizer, and a sample of all
texts goes to both tokenizers. The first difference, in any process of this host, ends the use of the fast
library for this tokenizer.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from rankmill.jobs.cache import Locked, lock, read_json, strangers
from rankmill.jobs.runtime.installation import install_line
from rankmill.jobs.system import system
from rankmill.workers.backends.base import is_panic
from rankmill.workers.batches.tokens import TokenIds, Tokens, ends
from rankmill.workers.host.disk_cache import digest, try_to_keep

_AFTER_SECONDS = 7.0
"""On a CPU, the proof of a fast tokenizer library (a comparison with Hugging Face's) begins after this many
seconds of tokenizing. The proof takes about as long.
"""

_SAMPLE = 256
"""One of this many texts, chosen at random, is tokenized by the fast library and by Hugging Face's, to
compare the ids.
"""

_CACHED_WORDS = 1 << 18
"""Number of words that nanotoken remembers, in two tables with about 64 bytes for each word."""

_RECIPE = 1
"""Version of the proof of a fast tokenizer library. Raise it when the proof compares more, so that each host
proves its tokenizers again.
"""

_PLANES = (0, 1, 2, 3, 14)
"""Planes of Unicode that have characters of general use."""

CODES = [code for plane in _PLANES for code in range(plane << 16, (plane + 1) << 16)]
"""The fast tokenizer library is compared with Hugging Face's for these code points, except for surrogates. A
text with any other code point never goes to the fast library.
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


class FastTexts:
    """Tokenizes single texts without special tokens and truncation, for one thread at a time.

    Parameters
    ----------
    slow
        Hugging Face's tokenizer.
    cache
        Cache folder; ``None`` means that only Hugging Face's tokenizer is used.
    """

    def __init__(self, slow: Tokenizer, cache: Path | None) -> None:
        self._slow = slow
        self._seconds = self._due = 0.0
        self._fast: FastEncode | None = None
        self._proven: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._news: str | None = None
        self._make: Callable[[str], FastEncode] | None = None
        self._missing: str | None = None
        if cache is None or slow.encode_special_tokens or type(slow.model).__name__ not in LIBRARIES:
            return
        library, make = LIBRARIES[type(slow.model).__name__]
        try:
            versions = [f"{name} {metadata.version(name)}" for name in (library, "tokenizers")]
        except metadata.PackageNotFoundError:
            self._missing = library
            return
        name = digest([_RECIPE, *versions, slow.to_str()])
        self._library, self._file = library, cache / "tokenizers" / f"{name}.json"
        if why := strangers(self._file.parent, cache):
            logger.warning("%s is not used: %s", library, why)
            return
        self._make = make
        self._read()

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def news(self) -> str | None:
        """Return what was found wrong with the fast tokenizer library since the last call, if anything."""
        news, self._news = self._news, None
        return news

    def settle(self) -> bool:
        """If possible, compare the fast tokenizer library with Hugging Face's now, and wait for the result.

        Returns whether the fast library is in use.
        """
        if proof := self.begin_proof():
            proof.join()
        return self.is_fast

    def __call__(self, texts: list[str]) -> Tokens:
        tokens = self._tokenize_fast(texts) if self._fast else None
        if tokens is not None:
            return tokens
        began = system.monotonic()
        tokens = slow_tokens(self._slow, texts)
        self._seconds += system.monotonic() - began
        if self._make is not None and self._seconds >= _AFTER_SECONDS:
            self._seconds = 0.0
            self.begin_proof()
        return tokens

    def _tokenize_fast(self, texts: list[str]) -> Tokens | None:
        """Tokenize texts with the fast library, or with Hugging Face's where the fast one may be wrong.

        Returns ``None`` if the library fails, or if this or another process finds that its ids are wrong.
        """
        if _stamp(self._file) != self._seen:
            self._read()
        if self._make is None or self._fast is None:
            self._news, self._fast = "another process of this host has found that its ids differ", None
            return None
        try:
            odd = self._unproven(texts)
            tokens = self._mixed(texts, odd) if odd else fast_tokens(self._fast, texts)
            wrong = self._differing(texts, tokens)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            wrong = f"{type(error).__name__}: {error}"
        if wrong is None:
            return tokens
        self._news, self._fast, self._make = wrong, None, None
        logger.critical("%s is not used for this tokenizer any more: %s", self._library, wrong)
        self._write({"wrong": wrong})
        return None

    def _unproven(self, texts: list[str]) -> list[int]:
        """Return the indices of texts with a character for which the fast library may give wrong ids."""
        other = [place for place, text in enumerate(texts) if not text.isascii()]
        if not other or self._all_proven("".join([texts[place] for place in other])):
            return []
        return [place for place in other if not self._all_proven(texts[place])]

    def _all_proven(self, text: str) -> bool:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return bool(self._proven[codes].all())

    def _mixed(self, texts: list[str], odd: list[int]) -> Tokens:
        """Tokenize the texts at the indices `odd` with Hugging Face's tokenizer, and all other texts with the
        fast library.
        """
        assert self._fast
        others = sorted(set(range(len(texts))) - set(odd))
        fast = fast_tokens(self._fast, [texts[place] for place in others])
        both = Tokens.join([fast, slow_tokens(self._slow, [texts[place] for place in odd])])
        return both.take(np.argsort([*others, *odd]))

    def _differing(self, texts: list[str], tokens: Tokens) -> str | None:
        """Compare the ids in `tokens` with Hugging Face's for a random sample of the texts.

        Returns how they differ, or ``None`` if they agree.
        """
        self._due += len(texts) / _SAMPLE
        wanted, self._due = int(self._due), self._due % 1
        places = [min(int(system.uniform(0, len(texts))), len(texts) - 1) for _ in range(wanted)]
        right = slow_tokens(self._slow, [texts[place] for place in places])
        for number, place in enumerate(places):
            if not np.array_equal(row(right, number), row(tokens, place)):
                return f"other ids for {described(texts[place])}"
        return None

    def begin_proof(self) -> threading.Thread | None:
        """Start a thread that compares the fast tokenizer library with Hugging Face's, and return the thread.

        Returns ``None`` if no thread starts, for example because another process is comparing them already.
        """
        if self._missing:
            logger.warning(
                "%s is missing: Hugging Face's tokenizer takes ten times as long, and a GPU waits for it; %s",
                self._missing,
                install_line("cuda"),
            )
            self._missing = None
        if self._make is None or self._fast:
            return None
        try:
            held = lock(self._file.with_suffix(".lock"), wait=False)
        except OSError as error:
            logger.warning("%s is not used, as the cache cannot be written: %s", self._library, error)
            self._make = None
            return None
        if held is None:
            return None
        if os.fstat(held.fileno()).st_size:
            logger.warning("%s is not used for this tokenizer: it has crashed a worker", self._library)
            self._write({"wrong": "a worker crashed while it compared it"})
        self._read()
        if self._make is None or self._fast:
            held.close()
            return None
        proof = system.Thread(
            target=self._prove, args=[self._make, held], name="tokenizer-proof", daemon=True
        )
        proof.start()
        return proof

    def _prove(self, make: Callable[[str], FastEncode], held: Locked) -> None:
        began, handled = system.monotonic(), faulthandler.is_enabled()
        # If the library crashes the process, this writes into the locked file. A kill writes nothing.
        faulthandler.enable(held)
        try:
            result: dict[str, Any] = {"proven": prove_tokenizer(self._slow, make(self._slow.to_str()))}
        except BaseException as error:
            is_told = isinstance(error, Untrusted)
            result = {"wrong": str(error) if is_told else f"{type(error).__name__}: {error}"}
            logger.warning("%s is not used for this tokenizer: %s", self._library, result["wrong"])
        else:
            seconds = system.monotonic() - began
            logger.info(
                "%s tokenizes from now on: its ids are those of tokenizers (compared in %.1f s)",
                self._library,
                seconds,
            )
        faulthandler.disable()
        if handled:
            faulthandler.enable(2)  # standard error
        self._write(result)
        held.close()

    def _read(self) -> None:
        self._seen = _stamp(self._file)
        self._take(read_json(self._file))

    def _take(self, kept: dict[str, Any]) -> None:
        if "wrong" in kept:
            self._make = None
        elif self._fast is None and self._make is not None and "proven" in kept:
            try:
                proven = np.zeros(0x110000, np.bool_)
                for start, stop in kept["proven"]:
                    proven[start:stop] = True
                self._proven = proven
                # set last, because the main thread uses the library as soon as this is set
                self._fast = self._make(self._slow.to_str())
            except (TypeError, ValueError) as error:
                logger.warning("%s is damaged: %s", self._file, error)

    def _write(self, result: dict[str, Any]) -> None:
        try_to_keep(self._file, {"library": self._library, **result}, "what is known of a tokenizer")
        self._take(result)  # do not read the file: a full disk may have kept it from being written


def _stamp(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _nanotoken(text: str) -> FastEncode:
    import nanotoken

    nanotoken.set_cache_entries(_CACHED_WORDS)
    core = nanotoken.WordPieceTokenizer.from_json(text)

    def encode(texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        # Do not tokenize in parallel: one thread tokenizes faster than any device here computes scores, and
        # the library's threads would not survive a fork.
        return core.encode_batch(texts, add_special_tokens=False, parallel=False)

    return encode


def _fastokens(text: str) -> FastEncode:
    import fastokens

    core = fastokens.Tokenizer.from_json_str(text)

    def encode(texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        ids, offsets = core.encode_batch_flat(texts)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64)

    return encode


LIBRARIES: dict[str, tuple[str, Callable[[str], FastEncode]]] = {
    "WordPiece": ("nanotoken", _nanotoken),
    "BPE": ("fastokens", _fastokens),
}
"""For each kind of Hugging Face tokenizer, the name of a fast tokenizer library, and a function that makes
the library's tokenizer from JSON.
"""


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
