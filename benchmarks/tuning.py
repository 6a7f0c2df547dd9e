"""Measures how near ``rankmill tune`` comes to the best of a full grid, in what time, and what it gains.

    python -m benchmarks.tuning --model MODEL --pairs PAIRS.parquet

The script tunes as the command does, and then measures every cell of a grid with fresh workers, on the pairs
that tuning used. Because a machine's speed drifts, the grid's three best, the tuned and the default settings
score these pairs in turn at the end. After an interruption, the same command continues, but an unfinished
tuning begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from benchmarks.comparison.environments import HOME
from benchmarks.comparison.report import machine
from rankmill.extensions.lab.bench import Records
from rankmill.extensions.lab.commands.tune import parse_seconds
from rankmill.extensions.lab.grid import label
from rankmill.extensions.lab.machine import markdown_table
from rankmill.extensions.lab.pairs import fingerprint, sample
from rankmill.extensions.lab.tune import MAX_ROWS, Changes, ReferenceScores, Trials, Tuner, rank_agreement
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.contract.spec import Precision
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.workers.backends.auto import backends

MIN_SPEARMAN = 0.999
NEAR, SHARE = 0.97, 0.1
"""The goal is this share of the speed of the grid's best, in this share of the grid's time."""
FINALISTS = 3
"""Number of the grid's fastest cells that are measured again, because the fastest may have been lucky."""
REPEATS, TIMEOUT = 3, 3600
TOKENS = (256, 512, 1024, 2048, 4096, 8192)  # on a CPU; 16 times as many elsewhere

Kept = dict[str, Any]
tell = partial(print, file=sys.stderr, flush=True)


class Cell(BaseModel):
    """Settings, and the seconds of each run, or why there are none; ``wall`` has the seconds of the whole
    cell.
    """

    changes: dict[str, Any]
    seconds: list[float] = []
    spearman: float = 0.0
    reason: str = ""
    wall: float = 0.0


def main() -> None:
    """Measure what is not measured yet, and print the tables in Markdown."""
    args = arguments()
    base, pairs, here = load_settings({"model": args.model}), sample(args.pairs, args.sample), machine()
    asked = [version("rankmill"), base.model_dump(), fingerprint(pairs), args.budget, here]
    records = Records(args.records, hashlib.sha256(json.dumps(asked).encode()).hexdigest())
    with Trials(base, pairs, "throughput", args.budget + TIMEOUT) as trials:
        tuned = once(records, "tuning", lambda: tune(base, trials, args.budget))
        reference = ReferenceScores(**tuned["reference"])
        trials.use(reference)
        cells = grid(trials, reference, args.leave_out, records)
        ranked = sorted((cell for cell in cells if cell.seconds), key=lambda cell: median(cell.seconds))
        good = [cell.changes for cell in ranked if cell.spearman >= MIN_SPEARMAN]
        if not good:
            sys.exit("no cell of the grid keeps the ranks, so there is nothing to compare with")
        rivals = {f"grid's {place}.": changes for place, changes in enumerate(good[:FINALISTS], 1)}
        rivals |= {"tuned": tuned["changes"], "default": {}}
        name = f"{args.rounds} rounds of {json.dumps(rivals)}"
        met = once(records, name, lambda: meet(trials, rivals, reference, args.rounds))
    told = report(tuned, ranked, {name: Cell(**cell) for name, cell in met.items()})
    print(told)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "tuning.md").write_text(told + "\n", encoding="utf-8")
        every = {"machine": here, "tuning": tuned, "grid": [dict(cell) for cell in cells], "meeting": met}
        (args.out / "tuning.json").write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", required=True, help="a file with the columns query and passage")
    parser.add_argument("--budget", type=parse_seconds, default="2m", help="of tuning; default: 2m")
    parser.add_argument("--sample", type=int, default=MAX_ROWS, help="pairs, of which tuning may take fewer")
    parser.add_argument("--rounds", type=int, default=7, help="of the meeting at the end")
    parser.add_argument("--leave-out", action="append", default=[], help="of the grid: a backend, as mlx")
    parser.add_argument("--records", type=Path, default=HOME / "tuning.jsonl", help="what was measured")
    parser.add_argument("--out", type=Path, help="folder for tuning.md and tuning.json")
    return parser.parse_args()


def once(records: Records, name: str, measure: Callable[[], Kept]) -> Kept:
    """The value recorded under `name`; without a record, measure and record it."""
    if records.get(name) is None:
        records.add(name, measure())
    return dict(records.get(name) or {})


def tune(base: Settings, trials: Trials, budget: float) -> Kept:
    """The settings that ``rankmill tune`` chooses, and the time that it takes."""
    started = time.monotonic()
    options: Kept = {"budget": budget, "min_spearman": MIN_SPEARMAN, "say": tell}
    with tempfile.TemporaryDirectory() as folder:
        own = Records(Path(folder) / "records.jsonl")
        tuned = Tuner(base, trials, "throughput", own, **options).tune()
        trials.end_others(None)
    wall, reference = time.monotonic() - started, own.get("reference")
    return {"wall": wall, "changes": tuned.changes, "story": tuned.story, "reference": reference}


def grid(trials: Trials, reference: ReferenceScores, left_out: Sequence[str], records: Records) -> list[Cell]:
    """Measure all cells; a backend and precision that fail in their first cell are not measured further."""
    cells = []
    names = [name for name in backends() if name not in left_out]
    for backend, precision in itertools.product(names, get_args(Precision)[1:]):
        for number, shape in enumerate(shapes(reference.device)):
            changes = {"backend": backend, "precision": precision, **shape}
            cell = Cell(**once(records, label(changes), partial(measure, trials, changes, reference)))
            tell(f"{label(changes)}: {cell.reason or f'{median(cell.seconds):.2f} s'}")
            cells.append(cell)
            if cell.reason and not number:
                break
    return cells


def shapes(device: str) -> list[dict[str, int]]:
    """Token budgets, and workers that share the cores or the GPU."""
    splits = [{"workers": count} for count in ((1, 2) if device == "cuda" else (1,))]
    if device == "cpu":
        counts = sorted({2**power for power in range(cores().bit_length())} | {cores()})
        splits = [{"workers": count, "threads": cores() // count} for count in counts]
    times = 1 if device == "cpu" else 16
    return [{"token_budget": times * tokens, **split} for tokens in TOKENS for split in splits]


def measure(trials: Trials, changes: Changes, reference: ReferenceScores) -> Kept:
    """Measure a cell with fresh workers."""
    started, cell = time.monotonic(), Cell(changes=dict(changes))
    try:
        workers = trials.warm(changes)
        runs = [trials.bulk(workers) for _ in range(REPEATS)]
        cell.seconds = [run.seconds for run in runs]
        cell.spearman = spearman(trials, runs[0].scores, reference)
    except RankmillError as error:
        cell.reason = " ".join(str(error).split())
    trials.end_others(None)
    cell.wall = time.monotonic() - started
    return cell.model_dump()


def spearman(trials: Trials, scores: npt.NDArray[np.float32], reference: ReferenceScores) -> float:
    """Rank correlation with the reference; 0 without ranks."""
    found = rank_agreement(trials.pairs, scores, reference.scores)
    return found.spearman if found else 0.0


def meet(trials: Trials, rivals: Mapping[str, Changes], reference: ReferenceScores, rounds: int) -> Kept:
    """Let settings score the sample in turn, in the reverse order every other time."""
    cells = {name: Cell(changes=dict(changes)) for name, changes in rivals.items()}
    live = {name: trials.warm(changes) for name, changes in rivals.items()}
    for name, cell in cells.items():
        cell.spearman = spearman(trials, trials.bulk(live[name]).scores, reference)
    for number in range(rounds):
        for name in list(live)[:: -1 if number % 2 else 1]:
            cells[name].seconds.append(trials.bulk(live[name]).seconds)
    return {name: cell.model_dump() for name, cell in cells.items()}


def report(tuned: Kept, ranked: Sequence[Cell], met: Mapping[str, Cell]) -> str:
    """The grid's fastest cells, the meeting, and whether the goals are met."""
    pairs, table = len(tuned["reference"]["scores"]), []
    for name, cell in [*((f"{place}.", cell) for place, cell in enumerate(ranked[:10], 1)), *met.items()]:
        slowest, usual, fastest = (f"{pairs / pick(cell.seconds):.0f}" for pick in (max, median, min))
        ranks = f"{cell.spearman:.5f}{'' if cell.spearman >= MIN_SPEARMAN else ', too low'}"
        table.append((name, label(cell.changes) or "none", usual, f"{slowest} to {fastest}", ranks))
    own, wall = met["tuned"].seconds, sum(cell.wall for cell in ranked)
    best = min((name for name in met if name.startswith("grid")), key=lambda name: median(met[name].seconds))
    near, gain = (median(map(truediv, met[name].seconds, own)) for name in (best, "default"))
    share, said = tuned["wall"] / wall, ("no", "yes")
    goals = [
        (f"speed, tuned / {best}", f"{near:.3f}", f"{NEAR} or more", said[near >= NEAR]),
        ("time, tuning / grid", f"{share:.3f}", f"{SHARE} or less", said[share <= SHARE]),
        ("speed, tuned / default", f"{gain:.3f}", "", ""),
    ]
    of = ", ".join(dict.fromkeys(cell.changes["backend"] for cell in ranked))
    parts = [
        "# Tuning beside a grid",
        f"{pairs} pairs. Tuning: {tuned['wall']:.0f} s; grid: {wall:.0f} s, {len(ranked)} cells of {of}.",
        markdown_table(("", "settings given", "pairs/s", "range", "Spearman"), table),
        markdown_table(("", "found", "goal", "met"), goals),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
