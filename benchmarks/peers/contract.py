"""The arguments, the measurement and the output of every script here.

    python SCRIPT --model DIR --pairs FILE.parquet --output SCORES.npy

A script prints one line of JSON: ``load_seconds``, ``seconds`` (scoring every pair once, warmed up; the
fastest of ``--times``), ``precision`` (the arithmetic of its matrix products), ``settings`` and ``versions``;
and it writes float32 scores in the order of the pairs. The first lines of a script that needs an environment
of its own say which (PEP 723).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

WARM_UP = 256

Score = Callable[[list[str], list[str]], Any]
"""Scores queries and passages ``[n]``; returns ``n`` numbers."""


class Loaded(NamedTuple):
    """The scoring function of a model; the arithmetic of its products (fp32, bf16, fp16 or int8); its
    settings.
    """

    score: Score
    precision: str
    settings: str


Load = Callable[[argparse.Namespace], Loaded]


def arguments(*, choices: Iterable[str] = ("default",)) -> argparse.Namespace:
    """The command line; ``--variant`` is one of `choices`, the first if not given."""
    variants = list(choices)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--times", type=int, default=1, help="score everything so often; the fastest counts")
    return parser.parse_args()


def measure(args: argparse.Namespace, load: Load, packages: Iterable[str]) -> None:
    """Load, warm up on pairs from short to long, score everything, report."""
    table = pq.read_table(args.pairs, columns=["query", "passage"])
    queries, passages = table["query"].to_pylist(), table["passage"].to_pylist()
    started = time.perf_counter()
    score, precision, settings = load(args)
    load_seconds = time.perf_counter() - started
    by_length = sorted(range(len(passages)), key=lambda row: len(passages[row]))
    some = by_length[:: max(1, len(by_length) // WARM_UP)]
    score([queries[row] for row in some], [passages[row] for row in some])
    seconds = float("inf")
    for _ in range(args.times):
        started = time.perf_counter()
        scores = score(queries, passages)
        seconds = min(seconds, time.perf_counter() - started)
    report(args, scores, load_seconds, seconds, precision, settings, packages)


def report(
    args: argparse.Namespace,
    scores: Any,
    load_seconds: float,
    seconds: float,
    precision: str,
    settings: str,
    packages: Iterable[str],
) -> None:
    """Write the scores and print the line of JSON."""
    np.save(args.output, np.asarray(scores, dtype=np.float32).reshape(-1))
    found = {
        "load_seconds": round(load_seconds, 3),
        "seconds": round(seconds, 3),
        "precision": precision,
        "settings": settings,
        "versions": {name: version(name) for name in packages},
    }
    print(json.dumps(found), flush=True)
