"""Compares the speed of single texts with that of pairs with the same tokens, in turn.

    python -m benchmarks.engine.texts --model DIR --pairs FILE.parquet

A text is a query, a full stop in the place of the separating token, and the passage, so it has as many tokens
as the pair. Texts and pairs are scored as a worker does, tokenizing included. Each round gives a ratio, also
of the processor's time, which says more where other programs run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host.device import use_threads


def measure(engine: Engine, columns: list[list[str]]) -> tuple[float, float, int]:
    """Seconds of the wall and of the processor to score rows, and the number of their tokens."""
    wall, busy = time.perf_counter(), time.process_time()
    scored = engine.score(*columns)
    assert not scored.errors, scored.errors
    return time.perf_counter() - wall, time.process_time() - busy, scored.tokens


def main() -> None:
    """Measure, and print each round and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="a classifier of BERT's kind")
    parser.add_argument("--pairs", type=Path, required=True, help="Parquet with query and passage")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    use_threads("auto")
    table = pq.read_table(args.pairs, columns=["query", "passage"])[: args.rows]
    queries, passages = (table[name].to_pylist() for name in ("query", "passage"))
    texts = [f"{query} . {passage}" for query, passage in zip(queries, passages, strict=True)]
    given: dict[Inputs, list[list[str]]] = {"pairs": [queries, passages], "texts": [texts]}
    budget, engines = first_budget("auto", "cpu"), {}
    with tempfile.TemporaryDirectory() as cache:
        for kind, columns in given.items():
            spec = ScoreSpec(model=args.model, inputs=kind)
            model = load_proven(spec, "cpu", args.backend, cache).model(spec)
            engines[kind] = Engine(model, budget)
            measure(engines[kind], columns)
            print(f"{kind}: {model.backend.name}, {model.backend.precision}")
        ratios: list[tuple[float, float]] = []
        for number in range(args.rounds):
            order = [*given] if number % 2 else [*given][::-1]
            took = {kind: measure(engines[kind], given[kind]) for kind in order}
            (wall, busy, tokens), (alone, alone_busy, same) = took["pairs"], took["texts"]
            ratios.append((wall / alone, busy / alone_busy))
            print(f"{tokens:,} and {same:,} tokens, {wall:.2f} s and {alone:.2f} s: {wall / alone:.3f}, "
                  f"of the processor's time {busy / alone_busy:.3f}", flush=True)  # fmt: skip
    walls, busies = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"single texts have {walls:.3f} of the speed of pairs (processor: {busies:.3f})")


if __name__ == "__main__":
    main()
