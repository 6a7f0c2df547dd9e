"""The speed of single texts beside that of pairs of the same tokens, from end to end, in turn.

    python -m benchmarks.engine.texts --model DIR --pairs FILE.parquet

A text is a query, a full stop in the place of the token between the two, and the passage: as many tokens as
the pair has. Both go through the same client, server and worker, and each round gives a ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rankmill import Client


def measure(client: Client, **rows: Any) -> tuple[float, int]:
    """Rows a second, and the tokens of all."""
    started = time.perf_counter()
    run = client.submit(**rows, priority="bulk")
    scores = run.scores()
    spent = time.perf_counter() - started
    assert not scores.errors, scores.errors
    return len(scores) / spent, run.stats.tokens


def main() -> None:
    """Measure, and print each round and the median of the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="a classifier of BERT's kind")
    parser.add_argument("--pairs", type=Path, required=True, help="Parquet with query and passage")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = pq.read_table(args.pairs, columns=["query", "passage"])[: args.rows]
    pairs = list(zip(table["query"].to_pylist(), table["passage"].to_pylist(), strict=True))
    texts = [f"{query} . {passage}" for query, passage in pairs]
    ratios = []
    with Client.embedded(model=args.model) as client:
        for rows in ({"pairs": pairs[:64]}, {"texts": texts[:64]}):
            client.score(**rows)  # loads and proves the model
        for number in range(args.rounds):
            order = ["pairs", "texts"] if number % 2 else ["texts", "pairs"]
            found = {
                kind: measure(client, **{kind: {"pairs": pairs, "texts": texts}[kind]}) for kind in order
            }
            (paired, of_pairs), (alone, of_texts) = found["pairs"], found["texts"]
            ratios.append(alone / paired)
            print(
                f"pairs {paired:,.0f}/s of {of_pairs:,} tokens, texts {alone:,.0f}/s of {of_texts:,}: "
                f"{ratios[-1]:.3f}",
                flush=True,
            )
    print(f"single texts have {statistics.median(ratios):.3f} of the speed of pairs with the same tokens")


if __name__ == "__main__":
    main()
