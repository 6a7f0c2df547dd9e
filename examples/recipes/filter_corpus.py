"""Filter a corpus by quality: score every text, keep the best share, and keep the scores.

python examples/recipes/filter_corpus.py corpus.jsonl kept.parquet 0.5 MODEL [redis://…]

MODEL is a classifier or regressor of single texts, such as HuggingFaceTB/fineweb-edu-classifier.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from rankmill import Client


def main(corpus: str, output: str, share: str, model: str, url: str = "") -> None:
    """Keep the `share` of the corpus with the best scores; a text without a score is not kept."""
    texts = pyarrow.json.read_json(corpus)
    with Client(url, model=model) if url else Client.embedded(model=model) as client:
        scores = client.score(texts=texts["text"], timeout=600)
    least = np.nanquantile(scores, 1 - float(share))
    kept = texts.append_column("quality", pa.array(scores)).filter(pa.array(scores >= least))
    pq.write_table(kept, output)
    print(f"{len(kept):,} of {len(texts):,} texts score {least:.2f} or more and are in {output}")
    for row, reason in scores.errors.items():
        print(f"text {row} has no score: {reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
