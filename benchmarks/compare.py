"""Compares rankmill with what people would use instead, on the same pairs and machine, in turn.

    python -m benchmarks.compare --model DIR --pairs FILE.parquet --qrels FILE --out docs/benchmarks

The command makes an environment for each peer under ``.bench/``, which takes minutes and some gigabytes the
first time. It runs every contender once in each round, and writes ``compare.md``, ``compare.json`` and
``compare.svg``. A contender that cannot run is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.comparison.contenders import CONTENDERS, FP32, Contender, run
from benchmarks.comparison.environments import HOME, ROOT
from benchmarks.comparison.report import bar_chart, machine
from benchmarks.comparison.standings import Results, from_json, standings
from benchmarks.engine.ceiling import Ceiling
from rankmill.extensions.lab.agreement import Qrels, agreement, ndcg


def read_qrels(path: Path) -> Qrels:
    """Read judgments in TREC's format, with ``query-id 0 document-id grade`` on each line."""
    found: dict[str, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        query, _, document, grade = line.split()
        found.setdefault(query, {})[document] = int(grade)
    return found


def main() -> None:
    """Compare, and print the Markdown."""
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [c for c in CONTENDERS if device in c.devices and (not args.only or c.name in args.only)]
    HOME.mkdir(exist_ok=True)
    pairs = sample(args.pairs, args.sample, HOME / "pairs.parquet")
    results = Results(asked=asked(args, pairs), machine=machine(), date=f"{datetime.now(UTC):%Y-%m-%d}")
    saved = args.out / "compare.json"
    if args.resume and saved.exists():
        before = from_json(json.loads(saved.read_text(encoding="utf-8")))
        if before.asked != results.asked:
            raise SystemExit(
                f"{saved} is of another comparison: {before.asked}; leave --resume away to replace it"
            )
        results = before
        results.runs = [each for each in before.runs if not each.failure]  # these may succeed now
    args.out.mkdir(parents=True, exist_ok=True)
    for round_ in range(1, args.repeats + 1):
        one_round(results, chosen, round_, args, pairs)
    save(results, args.out)
    print((args.out / "compare.md").read_text(encoding="utf-8"))


def arguments() -> argparse.Namespace:
    """The command line."""
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of a cross-encoder")
    parser.add_argument(
        "--pairs", type=Path, required=True, help="Parquet: query, passage; with --qrels qid, docid"
    )
    parser.add_argument("--qrels", type=Path, help="judgments in TREC's format, for nDCG@10")
    parser.add_argument(
        "--sample", type=int, default=4000, help="pairs to score, always the same ones; 0: all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the table shows medians")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=HOME / "results", help="folder for what is written")
    parser.add_argument("--resume", action="store_true", help="go on with the comparison in --out")
    parser.add_argument("--here", action="store_true", help="make no environments: run the peers in this one")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is no model: there is no config.json in it")
    if not args.pairs.is_file():
        parser.error(f"there is no file {args.pairs}")
    wanted = {"query", "passage"} | ({"qid", "docid"} if args.qrels else set())
    if missing := wanted - set(pq.read_schema(args.pairs).names):
        parser.error(f"{args.pairs} has no column {', '.join(sorted(missing))}")
    return args


def sample(source: Path, rows: int, target: Path) -> Path:
    """A fixed sample of the pairs, in the input's order."""
    table = pq.read_table(source)
    if 0 < rows < table.num_rows:
        places = np.random.default_rng(0).choice(table.num_rows, rows, replace=False)
        table = table.take(pa.array(np.sort(places)))
    pq.write_table(table, target)
    return target


def asked(args: argparse.Namespace, pairs: Path) -> dict[str, str]:
    """What identifies a comparison; two comparisons with the same identity can be joined."""
    return {
        "model": args.model.resolve().name,
        "pairs": str(pq.read_metadata(pairs).num_rows),
        "drawn from": args.pairs.name,
        "rounds": str(args.repeats),
        "rankmill": f"{version('rankmill')} ({commit()})",
    }


def commit() -> str:
    """The commit of the code, and whether the code differs from it."""
    changed = ", changed" if _git("diff", "--name-only", "HEAD", "--", "*.py") else ""  # results may change
    return (_git("rev-parse", "--short", "HEAD") or "no commit") + changed


def one_round(
    results: Results, chosen: list[Contender], round_: int, args: argparse.Namespace, pairs: Path
) -> None:
    """Measure the ceiling, then run every contender once, except those that ran or failed before."""
    if len(results.ceilings) < round_:
        results.ceilings.append(ceiling(args.model.resolve(), pairs))
    for contender in chosen:
        before = results.of(contender)
        if any(each.failure or each.round == round_ for each in before):
            continue
        found = run(contender, round_, args.model, pairs, scores_of(contender), here=args.here)
        results.runs.append(found)
        results.quality = quality(results, pairs, args.qrels)
        said = found.failure or f"{results.pairs / found.seconds:,.0f} pairs/s"
        print(f"round {round_}: {contender.title}: {said}", file=sys.stderr, flush=True)
        save(results, args.out)


def ceiling(model: Path, pairs: Path) -> Ceiling:
    """The ceiling, measured in a process of its own like every contender."""
    command = [sys.executable, "-m", "benchmarks.engine.ceiling", str(model), str(pairs)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Ceiling(**json.loads(done.stdout.splitlines()[-1]))


def quality(results: Results, pairs: Path, qrels: Path | None) -> dict[str, dict[str, float]]:
    """Compare each contender's last scores with those of fp32, and with the judgments."""
    table: pd.DataFrame = pq.read_table(pairs).to_pandas()
    judged = read_qrels(qrels) if qrels else None
    scores = {c.name: np.load(scores_of(c)) for c in CONTENDERS if results.speeds(c)}
    found: dict[str, dict[str, float]] = {}
    for name, mine in scores.items():
        found[name] = {}
        if FP32.name in scores and (ranks := agreement(list(table["query"]), mine, scores[FP32.name])):
            found[name] |= {"spearman": ranks.spearman, "low": ranks.low, "high": ranks.high}
            found[name] |= {} if ranks.top_overlap is None else {"top_overlap": ranks.top_overlap}
        if judged is not None:
            names = list(table["qid"].astype(str)), list(table["docid"].astype(str))
            value = ndcg(*names, mine, judged)
            found[name] |= {} if value is None else {"ndcg": value}
    return found


def scores_of(contender: Contender) -> Path:
    """Path of the contender's scores."""
    return HOME / f"{contender.name}.npy"


def save(results: Results, folder: Path) -> None:
    """Write the raw runs, the tables and the chart of the runs so far."""
    (folder / "compare.json").write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")
    (folder / "compare.md").write_text(standings(results) + "\n", encoding="utf-8")
    bars = [(c.title, speed, c.ours) for c in CONTENDERS if (speed := results.speed(c))]
    if bars:
        marks = {f"{name} products": speed for name, speed in results.ceilings_by_precision().items()}
        bar_chart(folder / "compare.svg", bars, unit="pairs/s", marks=marks)


def _git(*arguments: str) -> str:
    """The output of git; empty outside a repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
