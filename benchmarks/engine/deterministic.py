"""Measures the time that `deterministic` costs, and the rows whose bits change without it.

    python -m benchmarks.engine.deterministic [--model MODEL] [--pairs PAIRS.parquet] [--sample 250]

Each backend and precision of this machine scores the same pairs in turn without and with it, in a shuffled
order each time, in one process. The table has the ratio of the medians and how many rows had not the same
bits in all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.engine.backends import loaded, read_pairs
from benchmarks.engine.models import random_bert
from rankmill.extensions.lab.machine import markdown_table
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import resolve_device, use_threads


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="default: one of MiniLM-L6's shape, made here")
    parser.add_argument("--pairs", type=Path, help="parquet: query, passage; default: the shipped example")
    parser.add_argument("--sample", type=int, default=250, help="pairs, from the beginning")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--leave-out", action="append", default=["mlx"], help="a backend, as MLX, which takes minutes"
    )
    args = parser.parse_args()
    use_threads("auto")
    device = resolve_device("auto")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model"
        model = args.model or str(random_bert(made, hidden=384, layers=6, heads=12, positions=512))
        pairs = read_pairs(args.pairs, args.sample)
        usual = loaded(model, device, args.leave_out, folder)
        fixed = loaded(model, device, args.leave_out, folder, deterministic=True)
        rows = [(*name, *compared((usual[name], fixed[name]), pairs, args.repeats)) for name in usual]
    headings = ("backend", "precision", "time", "rows that differ without", "with")
    print(markdown_table(headings, rows))


def compared(
    engines: tuple[Engine, Engine], pairs: tuple[list[str], list[str]], repeats: int
) -> tuple[str, ...]:
    """The second engine's time as a multiple of the first's, and the shares of rows that differ in each."""
    chance = np.random.default_rng(0)
    seconds: list[list[float]] = [[], []]
    bits: list[list[npt.NDArray[np.uint32]]] = [[], []]
    for round_ in range(repeats + 1):
        order = chance.permutation(len(pairs[0]))
        queries, passages = ([texts[row] for row in order] for texts in pairs)
        for number, engine in enumerate(engines):
            engine.size.token_budget = (2048, 512, 8192)[round_ % 3] if number else engine.size.token_budget
            started = time.perf_counter()
            found = engine.score(queries, passages).scores
            if round_:  # the first one warms up
                seconds[number].append(time.perf_counter() - started)
            bits[number].append(found[np.argsort(order)].view(np.uint32))
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
    shares = [(np.stack(each) != each[0]).any(axis=0).mean() for each in bits]
    return f"{ratio:.2f}", *(f"{share:.0%}" for share in shares)


if __name__ == "__main__":
    main()
