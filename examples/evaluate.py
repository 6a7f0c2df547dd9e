"""Measure how often a cross-encoder ranks the best passage of each query in ``pairs.jsonl`` first.

    python examples/evaluate.py examples/demo-model

Word overlap and BM25 are measured, too. A passage with the score of the best passage counts as ranked before
the best passage.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(__file__).resolve().parent
STOP_WORDS = frozenset(
    """a an and are as at be been but by can could did do does for from had has have he her his how
    i if in into is it its may me more most my no not of on or our she should so such than that
    the their them then there these they this those to was we were what when where which who
    whom whose why will with would you your""".split()  # noqa: SIM905
)
Score = Callable[[str, list[str]], list[float]]


def words(text: str) -> list[str]:
    """Split a text into lower-case words and numbers."""
    return re.findall(r"[a-z0-9]+", text.lower())


def overlap(query: str, passages: list[str]) -> list[float]:
    """Count the distinct query words, other than stop words, that a passage has."""
    wanted = set(words(query)) - STOP_WORDS
    return [float(len(wanted & set(words(passage)))) for passage in passages]


def bm25(query: str, passages: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    """Score with BM25, whose statistics are those of the query's own passages."""
    counts = [Counter(words(passage)) for passage in passages]
    mean = sum(c.total() for c in counts) / len(counts)
    scores = [0.0] * len(passages)
    for word in set(words(query)):
        having = sum(word in c for c in counts)
        idf = math.log(1 + (len(counts) - having + 0.5) / (having + 0.5))
        for index, c in enumerate(counts):
            scores[index] += idf * c[word] * (k1 + 1) / (c[word] + k1 * (1 - b + b * c.total() / mean))
    return scores


def cross_encoder(folder: Path) -> Score:
    """Load a cross-encoder with one output; its logits are the scores."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()

    @torch.inference_mode()
    def score(query: str, passages: list[str]) -> list[float]:
        pairs = [query] * len(passages), passages
        batch = tokenizer(*pairs, padding=True, truncation=True, max_length=512, return_tensors="pt")
        scores: list[float] = model(**batch).logits[:, 0].tolist()
        return scores

    return score


def ranks(queries: dict[str, list[dict[str, Any]]], score: Score) -> list[int]:
    """Rank of the best passage of each query."""
    found = []
    for query, rows in queries.items():
        scores = score(query, [row["passage"] for row in rows])
        best = scores[[row["relevant"] for row in rows].index(2)]
        found.append(sum(value >= best for value in scores))
    return found


def main() -> None:
    """Print accuracy at 1 and mean reciprocal rank of each method."""
    parser = argparse.ArgumentParser(description="Measure a cross-encoder on the example pairs.")
    parser.add_argument("models", type=Path, nargs="*", default=[HERE / "demo-model"])
    parser.add_argument("--pairs", type=Path, default=HERE / "pairs.jsonl")
    args = parser.parse_args()
    queries: dict[str, list[dict[str, Any]]] = {}
    for line in args.pairs.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        queries.setdefault(row["query"], []).append(row)
    methods: dict[str, Score] = {"word overlap": overlap, "BM25": bm25}
    methods |= {str(folder): cross_encoder(folder) for folder in args.models}
    for name, score in methods.items():
        found = ranks(queries, score)
        first, mrr = found.count(1), sum(1 / rank for rank in found) / len(found)
        print(f"{name}: best passage first {first}/{len(found)} ({first / len(found):.2f}), MRR {mrr:.3f}")


if __name__ == "__main__":
    main()
