"""Compares every backend and precision here with PyTorch in fp32, and measures what a loaded model saves.

    python -m benchmarks.engine.backends [--model MODEL] [--pairs PAIRS.parquet]

All run in turn, in one process, on the same batches; the table has ratios of medians. Without --model the
command makes a model of MiniLM-L6's shape with random weights, which shows speed but not the quality of
rankings; without --pairs it takes the shipped example.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from benchmarks.engine.models import random_bert
from rankmill.extensions.lab.agreement import agreement
from rankmill.extensions.lab.machine import markdown_table
from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.backends.auto import backends
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import resolve_device, use_threads
from rankmill.workers.models.loading import load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pairs.jsonl"


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="default: one made here")
    parser.add_argument("--pairs", type=Path, help="parquet: query, passage; default: the shipped example")
    parser.add_argument("--sample", type=int, default=250, help="pairs, from the beginning")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--leave-out", action="append", default=[], help="a backend (MLX on a CPU takes minutes)"
    )
    args = parser.parse_args()
    use_threads("auto")
    device = resolve_device("auto")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(
            random_bert(Path(folder) / "model", hidden=384, layers=6, heads=12, positions=512)
        )
        queries, passages = read_pairs(args.pairs, args.sample)
        engines = loaded(model, device, args.leave_out, folder)
        print(table(engines, queries, passages, args.repeats))
        print()
        print(
            markdown_table(
                ("", "first load", "again, from the cache", "times"), [reload(model, device, folder)]
            )
        )


def read_pairs(path: Path | None, sample: int) -> tuple[list[str], list[str]]:
    """Queries and passages."""
    if path is None:
        rows = [json.loads(line) for line in EXAMPLE.read_text(encoding="utf-8").splitlines()][:sample]
        return [row["query"] for row in rows], [row["passage"] for row in rows]
    found = pq.read_table(path, columns=["query", "passage"]).slice(0, sample)
    return found["query"].to_pylist(), found["passage"].to_pylist()


def loaded(
    model: str, device: str, left_out: list[str], folder: str, *, deterministic: bool = False
) -> dict[tuple[str, str], Engine]:
    """An engine for each backend and precision that this machine has, PyTorch in fp32 first."""
    found: dict[tuple[str, str], Engine] = {}
    for backend, kind in sorted(backends().items(), key=lambda item: item[0] != "torch"):
        for precision in kind.precisions.get(device, ()):
            asked = {"model": model, "precision": precision, "deterministic": deterministic}
            spec = ScoreSpec.model_validate({**asked, "activation": "identity"})
            if backend in left_out:
                continue
            try:
                ready = load(spec, device, backend, folder).model(spec)
            except SpecError as error:
                print(f"left out: {error}")
                continue
            found[backend, precision] = Engine(ready, first_budget("auto", device))
    return found


def table(
    engines: dict[tuple[str, str], Engine], queries: list[str], passages: list[str], repeats: int
) -> str:
    """Speed as a multiple of that of PyTorch in fp32, and agreement with its scores."""
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in engines}
    scores: dict[tuple[str, str], npt.NDArray[np.float32]] = {}
    for round_ in range(repeats + 1):
        for name, engine in engines.items():
            started = time.perf_counter()
            scores[name] = engine.score(queries, passages).scores
            if round_:  # the first one warms up
                seconds[name].append(time.perf_counter() - started)
    first = next(iter(engines))
    base = statistics.median(seconds[first])
    rows = []
    for name, engine in engines.items():
        ratio = base / statistics.median(seconds[name])
        found = agreement(queries, scores[name], scores[first])
        spearman = f"{found.spearman:.4f}" if found else "-"
        difference = float(np.abs(scores[name] - scores[first]).max())
        size = engine.model.backend.bytes / 2**20
        rows.append((*name, f"{ratio:.2f}", spearman, f"{difference:.1e}", f"{size:.0f}"))
    headings = ("backend", "precision", "speed", "Spearman", "largest difference", "weights, MiB")
    return markdown_table(headings, rows)


def reload(model: str, device: str, folder: str) -> tuple[str, str, str, str]:
    """Seconds of the first load of a model in this process, and of looking it up again."""
    load_here = partial(load, device=device, backend="auto", cache_dir=folder)
    cache = EngineCache(load_settings({"cache_dir": folder}), device, load_here, lambda: None)
    spec = ScoreSpec(model=model)
    times = []
    for _ in range(101):
        started = time.perf_counter()
        cache.get(spec)
        times.append(time.perf_counter() - started)
    first, again = times[0], statistics.median(times[1:])
    return "auto", f"{first:.2f} s", f"{1e6 * again:.0f} µs", f"{first / again:,.0f}"


if __name__ == "__main__":
    main()
