"""Filter a corpus by quality: score every text, keep the best share, and keep the scores.

python examples/recipes/filter_corpus.py corpus.jsonl kept.parquet 0.5 [redis://…]

The model here scores pairs, so quality is how well a text answers what you ask of it.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from rankmill import Client

CRITERION = "a clear explanation with facts"


def main(corpus: str, output: str, share: str, url: str = "") -> None:
    """Keep the `share` of the corpus with the best scores; a text without a score is not kept."""
    texts = pyarrow.json.read_json(corpus)
    pairs = pa.table({"query": [CRITERION] * len(texts), "passage": texts["text"]})
    with Client(url, model="demo") if url else Client.embedded(model="demo") as client:
        scores = client.score(pairs, timeout=600)
    least = np.nanquantile(scores, 1 - float(share))
    kept = texts.append_column("quality", pa.array(scores)).filter(pa.array(scores >= least))
    pq.write_table(kept, output)
    print(f"{len(kept):,} of {len(texts):,} texts score {least:.2f} or more and are in {output}")
    for row, reason in scores.errors.items():
        print(f"text {row} has no score: {reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
