"""Compares ids and speed of fast tokenizer libraries with those of Hugging Face's, on a million texts.

    python -m benchmarks.tokenizers --model DIR --pairs FILE
    python -m benchmarks.tokenizers --rows 100000

First comes the proof that workers do (`rankmill.workers.models.fast_texts`), then texts of each kind:
passages and queries of the file with numbers before them, and made ones: code, Chinese, Japanese and Korean,
Arabic and Hebrew, Indic and Thai, Latin with accents, emoji, random characters of all of Unicode. With any
difference the exit status is 1, because a library that differs must not be used.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from rankmill.extensions.lab.pairs import sample
from rankmill.workers.models.description import describe
from rankmill.workers.models.fast_texts import (
    LIBRARIES,
    FastEncode,
    fast_tokens,
    prove_tokenizer,
    row,
    slow_tokens,
)
from rankmill.workers.models.sources import DEMO_MODEL
from rankmill.workers.models.tokenizer import single_texts

BLOCK = 10_000
"""Texts that are compared together."""

SCRIPTS = {
    "cjk": ((0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x3000, 0x303F), (0xFF00, 0xFFEF)),
    "arabic": ((0x0600, 0x06FF), (0x0750, 0x077F), (0x0590, 0x05FF), (0xFB50, 0xFDFF)),
    "indic": ((0x0900, 0x0DFF), (0x0E00, 0x0E7F), (0x1780, 0x17FF)),
    "latin": ((0x00C0, 0x024F), (0x0300, 0x036F), (0x1E00, 0x1EFF), (0x0370, 0x052F)),
    "emoji": ((0x1F300, 0x1FAFF), (0x2600, 0x27BF), (0x200D, 0x200D), (0xFE0F, 0xFE0F), (0x1F1E6, 0x1F1FF)),
    "unicode": ((0x0000, 0xD7FF), (0xE000, 0x10FFFF)),
}
"""Ranges of code points of which texts of a kind are made."""

SIGNS = (
    "()",
    "{",
    "}",
    ";\n",
    " = ",
    "->",
    "==",
    "!=",
    "\t",
    "    ",
    "\n",
    "//",
    "#",
    '"',
    "_",
    ".",
    ", ",
    "0x1F",
)
"""Signs in texts of code."""


def main() -> None:
    """Compare, print a line for each kind, and end with 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="a directory with a tokenizer")
    parser.add_argument("--pairs", default="varied", help="a file, or varied, example")
    parser.add_argument("--rows", type=int, default=1_000_000, help="texts, of all kinds together")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        slow = single_texts(describe(args.model, None, Path(cache)).tokenizer)
    library, make = LIBRARIES[type(slow.model).__name__]
    fast = make(slow.to_str())
    began = time.perf_counter()
    characters = sum(stop - start for start, stop in prove_tokenizer(slow, fast))
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"library": library, "proven_characters": characters, "seconds": seconds}), flush=True)
    kinds = texts_by_kind(args.pairs, sorted(slow.get_vocab()))
    found = [
        compare(kind, islice(texts, args.rows // len(kinds)), slow, fast) for kind, texts in kinds.items()
    ]
    print(json.dumps({"texts": sum(count for count, _ in found), "different": sum(bad for _, bad in found)}))
    sys.exit(any(bad for _, bad in found))


def texts_by_kind(pairs: str, vocabulary: list[str]) -> dict[str, Iterator[str]]:
    """Endless texts of each kind; the seed is fixed."""
    table = sample(pairs, 20_000)
    real = list(dict.fromkeys([*table["passage"].to_pylist(), *table["query"].to_pylist()]))
    chance = random.Random(1)
    kinds = {"pairs": endless(lambda number: f"{number} {real[number % len(real)]}")}
    words = [word.removeprefix("##") for word in vocabulary]
    kinds["code"] = endless(
        lambda _: "".join(chance.choice(words) + chance.choice(SIGNS) for _ in range(chance.randrange(1, 60)))
    )
    for kind, ranges in SCRIPTS.items():
        kinds[kind] = endless(partial(written, chance, ranges, words))
    return kinds


def endless(make: Callable[[int], str]) -> Iterator[str]:
    """Yield a text for each number from 0 on."""
    number = 0
    while True:
        yield make(number)
        number += 1


def written(
    chance: random.Random, ranges: tuple[tuple[int, int], ...], words: list[str], _number: int
) -> str:
    """A text of characters in some ranges, with spaces, digits and words between them."""
    pieces = []
    for _ in range(chance.randrange(1, 40)):
        low, high = chance.choice(ranges)
        near = chance.randint(low, high)
        run = [chance.randint(near, min(near + 64, high)) for _ in range(chance.randrange(1, 6))]
        pieces.append("".join(chr(code) for code in run if not 0xD800 <= code < 0xE000))
        pieces.append(chance.choice(["", "", " ", ", ", "\n", "7", f" {chance.choice(words)} "]))
    return "".join(pieces)


def compare(kind: str, texts: Iterator[str], slow: Tokenizer, fast: FastEncode) -> tuple[int, int]:
    """Compare the ids of texts, and print what each library takes for a text; returns the number of texts,
    and of those whose ids differ.
    """
    count = bad = 0
    seconds = [0.0, 0.0]
    while some := list(islice(texts, BLOCK)):
        times = [time.process_time()]
        ours = fast_tokens(fast, some)
        times.append(time.process_time())
        theirs = slow_tokens(slow, some)
        times.append(time.process_time())
        seconds = [seconds[side] + times[side + 1] - times[side] for side in (0, 1)]
        same = [row(ours, place).tolist() == row(theirs, place).tolist() for place in range(len(some))]
        count, bad = count + len(some), bad + same.count(False)
    micro = [round(1e6 * each / max(count, 1), 1) for each in seconds]
    line = {"kind": kind, "texts": count, "different": bad, "us_per_text": micro[0], "tokenizers": micro[1]}
    print(json.dumps(line), flush=True)
    return count, bad


if __name__ == "__main__":
    main()
