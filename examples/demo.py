"""Scores the example pairs with the demo model and shows the best passages; ``make demo`` runs this."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
SHOWN_QUERIES = slice(1, None, 6)  # four from all over the file
SHOWN_PASSAGES = 3


def main() -> None:
    """Run score-file as a user would, then print its output."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "pairs.scored.parquet"
        command = [
            Path(sys.executable).parent / "score-file",
            HERE / "pairs.jsonl",
            "--model",
            "demo",
            "-o",
            output,
        ]
        print("$ score-file examples/pairs.jsonl --model demo", flush=True)
        subprocess.run(list(map(str, command)), check=True)
        show(output)


def show(output: Path) -> None:
    """Print the best passages of a few queries, and how often the right one is the best."""
    rows = pq.read_table(output, columns=["query", "passage", "relevant", "score"]).to_pylist()
    queries: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: -row["score"]):
        queries.setdefault(row["query"], []).append(row)
    in_order = list(dict.fromkeys(row["query"] for row in rows))
    for query in in_order[SHOWN_QUERIES]:
        print(f"\n{query}  (the best {SHOWN_PASSAGES} of {len(queries[query])} passages)")
        for row in queries[query][:SHOWN_PASSAGES]:
            print(f"  {row['score']:6.2f}  {textwrap.shorten(row['passage'], width=100, placeholder=' …')}")
    first = sum(passages[0]["relevant"] == 2 for passages in queries.values())
    print(f"\nThe passage that answers is the best one for {first} of {len(queries)} queries.")


if __name__ == "__main__":
    main()
