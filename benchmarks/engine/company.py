"""Measures how far a row's score moves with other rows, their order, and the batch's and the chunk's size.

    python -m benchmarks.engine.company [--model MODEL] [--pairs PAIRS.parquet] [--sample 300]

Each backend and precision of this machine scores the same pairs several times, with each row alone, with
several token budgets, in shuffled orders, and in chunks of several sizes. The table has what
docs/explanation/backends.md says: the largest distance between two scores of one row, how many rows differ at
all, and how far they are from PyTorch's scores in fp32, each row alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.engine.backends import loaded, read_pairs
from benchmarks.engine.models import random_bert
from rankmill.extensions.lab.machine import markdown_table
from rankmill.workers.backends.base import Logits
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import resolve_device, use_threads

BUDGETS, CHUNKS, ORDERS = (512, 2048, 8192), (1, 7, 64), 3

Pairs = tuple[list[str], list[str]]


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="default: one of MiniLM-L6's shape, made here")
    parser.add_argument("--pairs", type=Path, help="parquet: query, passage; default: the shipped example")
    parser.add_argument("--sample", type=int, default=300, help="pairs, from the beginning")
    parser.add_argument(
        "--leave-out", action="append", default=[], help="a backend (MLX on a CPU takes minutes)"
    )
    args = parser.parse_args()
    use_threads("auto")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model"
        model = args.model or str(random_bert(made, hidden=384, layers=6, heads=12, positions=512))
        queries, passages = read_pairs(args.pairs, args.sample)
        engines = loaded(model, resolve_device("auto"), args.leave_out, folder)
        print(table(engines, (queries, passages)))


def table(engines: dict[tuple[str, str], Engine], pairs: Pairs) -> str:
    """A row for each backend and precision; the first engine, PyTorch's in fp32, is the reference."""
    exact = alone(next(iter(engines.values())), pairs)
    rows = []
    for name, engine in engines.items():
        scores = np.stack(list(in_company(engine, pairs)))
        spread = scores.max(axis=0) - scores.min(axis=0)
        off = np.abs(scores - exact).max()
        rows.append((*name, f"{spread.max():.2g}", f"{(spread > 0).mean():.0%}", f"{off:.2g}"))
    headings = ("backend", "precision", "largest difference", "rows that differ", "from fp32, at most")
    return markdown_table(headings, rows)


def alone(engine: Engine, pairs: Pairs) -> Logits:
    """The score of each row in a batch of its own."""
    return Engine(engine.model, 1).score(*pairs).scores


def in_company(engine: Engine, pairs: Pairs) -> Iterator[Logits]:
    """Yield the rows' scores, in the rows' order, for each way of cutting them."""
    queries, passages = (np.array(texts, dtype=object) for texts in pairs)
    yield alone(engine, pairs)
    for budget in BUDGETS:
        yield Engine(engine.model, budget).score(*pairs).scores
    for seed in range(ORDERS):
        order = np.random.default_rng(seed).permutation(len(queries))
        scores = Engine(engine.model, 2048).score(queries[order].tolist(), passages[order].tolist()).scores
        yield scores[np.argsort(order)]
    for size in CHUNKS:
        cuts = range(0, len(queries), size)
        chunks = [(pairs[0][start : start + size], pairs[1][start : start + size]) for start in cuts]
        yield np.concatenate([Engine(engine.model, 2048).score(*chunk).scores for chunk in chunks])


if __name__ == "__main__":
    main()
