"""What ``make demo`` runs: score the example pairs with the demo model and show the best passages."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
SHOWN_QUERIES = 4
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
    """Print the best passages of the first few queries."""
    rows = pq.read_table(output, columns=["query", "passage", "score"]).to_pylist()
    for query in list(dict.fromkeys(row["query"] for row in rows))[:SHOWN_QUERIES]:
        passages = sorted((row for row in rows if row["query"] == query), key=lambda row: -row["score"])
        print(f"\n{query}  (the best {SHOWN_PASSAGES} of {len(passages)} passages)")
        for row in passages[:SHOWN_PASSAGES]:
            print(f"  {row['score']:6.2f}  {textwrap.shorten(row['passage'], width=100, placeholder=' …')}")


if __name__ == "__main__":
    main()
