"""Make training queries from passages, each with candidate passages of graded closeness."""

from __future__ import annotations

import random
import re

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]

from examples.evaluate import STOP_WORDS

WORD = r"[a-z0-9]+"
DEFINITION = re.compile(r"^(?:an?|the)?\s*((?:[\w'-]+\s){1,4}?)(?:is|are|was|were)\s+(?:an?|the)\s", re.I)
ASK_DEFINITION = ("what is {}", "define {}", "{} meaning", "what does {} mean", "{}", "who is {}")
ASK_KEYWORDS = (
    *("what is {}", "how to {}", "{} meaning", "what causes {}", "how much does {} cost", "why {}"),
    *("how long does {} take", "when was {}", "best {}", "{} vs", "where is {}", "is {} safe"),
    *("how does {} work", "types of {}", "{} definition", "can you {}", "who {}", "how many {}"),
)


def keywords(sentence: str, count: int, idf: dict[str, float], rng: random.Random) -> str:
    """Pick the rarest words of a sentence, in their order, as a terse web query."""
    found = re.findall(r"[a-z0-9][a-z0-9'-]*", sentence.lower())
    words = dict.fromkeys(w for w in found if w not in STOP_WORDS and len(w) > 2)
    weight = {word: -idf.get(word, 6.0) * rng.uniform(0.5, 1) for word in words}
    chosen = set(sorted(words, key=weight.__getitem__)[:count])
    return " ".join(word for word in words if word in chosen)


def pseudo_query(text: str, idf: dict[str, float], rng: random.Random) -> tuple[str, str] | None:
    """Make a query from a sentence of a passage; returns the query and the passage that answers it, or
    ``None``.
    """
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if len(s.split()) >= 5]
    if not sentences:
        return None
    sentence = rng.choice(sentences)
    rest = " ".join(s for s in sentences if s is not sentence)
    draw = rng.random()
    definition = DEFINITION.match(sentence)
    if definition and draw < 0.7:
        query = rng.choice(ASK_DEFINITION).format(definition.group(1).strip().lower())
        rest = text
    elif draw < 0.3:
        query = keywords(sentence, rng.randint(2, 5), idf, rng)
    elif draw < 0.6:
        query = rng.choice(ASK_KEYWORDS).format(keywords(sentence, rng.randint(1, 3), idf, rng))
    else:
        words = re.findall(r"[\w'-]+", sentence.lower())
        length = rng.randint(4, 10)
        start = rng.randint(0, max(0, len(words) - length))
        query = " ".join(words[start : start + length])
    if len(query) < 4:
        return None
    return query, text if len(rest) < 80 or rng.random() < 0.3 else rest


def distractor(query: str, text: str, rng: random.Random) -> str:
    """A passage on something else, with the query's words scattered in it or all in one place.

    Without such pairs a small student learns to count shared words.
    """
    sentences = re.split(r"(?<=[.!?])\s+", text)
    wanted = [word for word in re.findall(r"[\w'-]+", query) if word.lower() not in STOP_WORDS] or [query]
    if rng.random() < 0.4:
        sentences.insert(rng.randint(0, len(sentences)), query.capitalize() + rng.choice(".?"))
        return " ".join(sentences)
    words = " ".join(sentences).split()
    for word in wanted:
        words.insert(rng.randint(0, len(words)), word)
    return " ".join(words)


def add_distractors(pairs: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    """`pairs`, and `count` distractors for each of their queries, which are made from random passages of
    `pairs`.
    """
    rng = random.Random(seed)  # noqa: S311
    texts = pairs["passage"].drop_duplicates().tolist()
    queries = pairs["query"].drop_duplicates().tolist()
    rows = [(query, distractor(query, rng.choice(texts), rng)) for query in queries for _ in range(count)]
    made = pd.DataFrame(rows, columns=["query", "passage"])
    return pd.concat([pairs, made]).drop_duplicates(ignore_index=True)


def build_pairs(pairs: pd.DataFrame, pseudo_queries: int, seed: int) -> pd.DataFrame:
    """Join the given pairs, random negatives for their queries, and the pseudo queries' pairs."""
    rng = random.Random(seed)  # noqa: S311
    texts = pairs["passage"].drop_duplicates().tolist()
    rng.shuffle(texts)
    vectorizer = TfidfVectorizer(token_pattern=WORD, stop_words=sorted(STOP_WORDS))
    matrix = vectorizer.fit_transform(texts)
    idf = dict(zip(vectorizer.get_feature_names_out(), vectorizer.idf_, strict=True))
    rows = list(pairs[["query", "passage"]].itertuples(index=False, name=None))
    for query in pairs["query"].unique():
        rows += [(query, text) for text in rng.sample(texts, min(40, len(texts)))]
    made = 0
    for index, text in enumerate(texts):
        pseudo = pseudo_query(text, idf, rng)
        if made >= pseudo_queries or pseudo is None:
            continue
        near_query = np.asarray((matrix @ vectorizer.transform([pseudo[0]]).T).todense()).ravel()
        near_text = np.asarray((matrix @ matrix[index].T).todense()).ravel()
        others = rng.sample(np.argsort(-near_query)[:12].tolist(), 4)
        others += rng.sample(np.argsort(-near_text)[1:20].tolist(), 2)
        others += [rng.randrange(len(texts))]
        rows += [pseudo] + [(pseudo[0], texts[i]) for i in dict.fromkeys(others) if i != index]
        made += 1
    return pd.DataFrame(rows, columns=["query", "passage"]).drop_duplicates(ignore_index=True)
