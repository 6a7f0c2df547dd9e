"""Writes a corpus, queries, judgements and a BM25 run of the shipped pairs, for the other recipes.

python examples/recipes/bm25.py FOLDER

Your own files can replace these, such as TREC runs of any engine and texts in BEIR's form.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

PAIRS = Path(__file__).parents[1] / "pairs.jsonl"
DEPTH, K1, B = 20, 0.9, 0.4


def ranked(queries: list[str], texts: list[str]) -> list[list[tuple[int, float]]]:
    """The best `DEPTH` texts of each query by BM25, as places with scores."""
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    lengths = [sum(bag.values()) for bag in bags]
    mean = sum(lengths) / len(lengths)
    found = Counter(word for bag in bags for word in bag)

    def score(words: list[str], at: int) -> float:
        total = 0.0
        for word in words:
            count = bags[at][word]
            weight = math.log(1 + (len(bags) - found[word] + 0.5) / (found[word] + 0.5))
            total += weight * count / (count + K1 * (1 - B + B * lengths[at] / mean))
        return total

    runs = []
    for query in queries:
        words = re.findall(r"\w+", query.lower())
        scores = ((at, score(words, at)) for at in range(len(texts)))
        runs.append(sorted(scores, key=lambda each: -each[1])[:DEPTH])
    return runs


def main(folder: Path) -> None:
    """Write corpus.jsonl, queries.jsonl, qrels.txt and bm25.trec."""
    pairs = [json.loads(line) for line in PAIRS.read_text("utf-8").splitlines()]
    queries = list(dict.fromkeys(pair["query"] for pair in pairs))
    texts = list(dict.fromkeys(pair["passage"] for pair in pairs))
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind, each in (("queries", "q", queries), ("corpus", "d", texts)):
        lines = [json.dumps({"_id": f"{kind}{at}", "text": text}) for at, text in enumerate(each)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    judged = [
        f"q{queries.index(pair['query'])} 0 d{texts.index(pair['passage'])} {pair['relevant']}"
        for pair in pairs
    ]
    (folder / "qrels.txt").write_text("\n".join(judged) + "\n")
    run = [
        f"q{number} Q0 d{at} {rank} {score:.6f} bm25"
        for number, best in enumerate(ranked(queries, texts))
        for rank, (at, score) in enumerate(best, 1)
    ]
    (folder / "bm25.trec").write_text("\n".join(run) + "\n")
    print(f"{len(texts)} passages, {len(queries)} queries and {len(run)} ranked pairs are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
