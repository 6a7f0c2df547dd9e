"""Make training pairs from WordNet, with queries that mean one sense of a word, and passages on its senses.

WordNet is a dictionary by meaning; its folder holds the files ``data.noun`` to ``data.adv`` (Debian's
package ``wordnet-base``).  A passage explains one sense and its surroundings in a few sentences, so
the passages of a query share its words and differ in what they are about.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from examples.evaluate import STOP_WORDS, words

ASK = (
    "what is {word} {about}",
    "{word} {about}",
    "how {about} {word}",
    "why {about} {word}",
    "{about} {word}",
)
KINDS = ("data.noun", "data.verb", "data.adj", "data.adv")


@dataclass
class Synset:
    """The words for one meaning, its definition, example sentences and related meanings."""

    words: list[str]
    definition: str
    examples: list[str]
    related: list[str] = field(default_factory=list)


def read_wordnet(folder: Path) -> dict[str, Synset]:
    """Read all meanings, keyed by file and offset; see the manual page wndb(5WN) for the format."""
    synsets: dict[str, Synset] = {}
    for name in KINDS:
        kind = name[5]
        for line in (folder / name).read_text(encoding="ascii").splitlines():
            if line.startswith("  "):
                continue
            data, gloss = line.split(" | ", 1)
            parts = data.split()
            count = int(parts[3], 16)
            lemmas = [re.sub(r"\(.*\)", "", word).replace("_", " ") for word in parts[4 : 4 + 2 * count : 2]]
            pointers = parts[5 + 2 * count :]
            related = [
                f"{pointers[i + 2]}{pointers[i + 1]}" for i in range(0, 4 * int(parts[4 + 2 * count]), 4)
            ]
            definition = re.split(r';\s*"', gloss)[0].strip(' ;"')
            synsets[f"{kind}{parts[0]}"] = Synset(
                lemmas, definition, re.findall(r'"([^"]+)"', gloss), related
            )
    return synsets


def passage(synset: Synset, synsets: dict[str, Synset], rng: random.Random) -> str:
    """Explain a meaning by its definition, its examples and up to two related meanings."""
    near = [synsets[key] for key in synset.related if key in synsets]
    parts = [f"{synset.words[0]}: {synset.definition}", *synset.examples]
    parts += [
        f"{other.words[0]}: {other.definition}"
        for other in rng.sample(near, min(len(near), rng.randint(0, 2)))
    ]
    if rng.random() < 0.5:
        rng.shuffle(parts)
    return " ".join(part[0].upper() + part[1:].rstrip(".") + "." for part in parts if part)


def ask(word: str, synset: Synset, synsets: dict[str, Synset], rng: random.Random) -> str:
    """A query for one meaning of a word, with the word and up to four others from its explanation."""
    near = [synsets[key] for key in synset.related if key in synsets]
    text = " ".join([synset.definition, *synset.examples, *(other.words[0] for other in near[:3])])
    content = [w for w in dict.fromkeys(words(text)) if w not in STOP_WORDS and w != word and len(w) > 2]
    chosen = set(rng.sample(content, min(len(content), rng.randint(1, 4))))
    about = " ".join(w for w in content if w in chosen)
    return rng.choice(ASK).format(word=word, about=about)


def build_sense_pairs(folder: Path, queries: int, seed: int) -> pd.DataFrame:
    """Pairs of `queries` queries, each with up to six senses of its word and three that share words."""
    rng = random.Random(seed)  # noqa: S311
    synsets = read_wordnet(folder)
    senses: dict[str, list[str]] = defaultdict(list)
    for key, synset in synsets.items():
        for word in synset.words:
            if word.islower() and " " not in word:
                senses[word].append(key)
    texts = {key: passage(synset, synsets, rng) for key, synset in synsets.items()}
    having: dict[str, list[str]] = defaultdict(list)
    for key, text in texts.items():
        for word in set(words(text)) - STOP_WORDS:
            having[word].append(key)
    many = sorted(word for word, keys in senses.items() if len(keys) > 2)
    rows: list[tuple[str, str]] = []
    for word in rng.choices(many, weights=[len(senses[word]) for word in many], k=queries):
        meant = rng.choice(senses[word])
        query = ask(word, synsets[meant], synsets, rng)
        others = [key for key in senses[word] if key != meant]
        chosen = [meant, *rng.sample(others, min(len(others), 5))]
        for shared in sorted(set(words(query)) - STOP_WORDS, key=lambda w: len(having[w]))[:3]:
            if having[shared]:
                chosen.append(rng.choice(having[shared]))
        rows += [(query, texts[key]) for key in dict.fromkeys(chosen)]
    return pd.DataFrame(rows, columns=["query", "passage"]).drop_duplicates(ignore_index=True)
