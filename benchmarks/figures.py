"""Measures the documents' figures that this machine can measure; the command may be interrupted.

    make figures                                   # MODEL, PAIRS and QRELS say of what
    make figures PARTS="compare feed" OPTIONS="--sample 2000"

Parts are ``peers`` (makes the environments of the comparison's peers), ``compare``, ``feed``, ``start``,
``memory`` and ``faults``. Each measurement is kept as soon as it ends, and the same command at the same
commit goes on with what is missing. The command writes the tables and plots of docs/benchmarks, with commit,
machine and date, and the comparison's result in README.md and docs/explanation/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from benchmarks.compare import commit
from benchmarks.comparison.contenders import CONTENDERS, SCORE_FILE, SCORE_FILE_INT8
from benchmarks.comparison.environments import ROOT, CannotInstall, python_for
from benchmarks.comparison.report import bar_chart, machine
from benchmarks.comparison.standings import EIGHT_BIT, EXACT, Results, from_json, number
from benchmarks.engine.models import random_bert
from benchmarks.faults.chaos import SCENARIOS
from benchmarks.memory import peaks, write_rows
from rankmill.extensions.lab.machine import markdown_table

FOLDER = ROOT / "docs" / "benchmarks"

Figures = dict[str, Any]
Steps = Iterator[tuple[str, Callable[[Path], Figures]]]


@dataclass(frozen=True)
class Part:
    """A table, with its measurements by name, the text above it, and the figure that its plot shows."""

    steps: Callable[[argparse.Namespace], Steps]
    about: str
    plotted: str


def main() -> None:
    """Measure what is missing of each chosen part, and write it down."""
    args = arguments()
    for name in args.parts:
        if name == "peers":
            make_environments(args.only)
        elif name == "compare":
            compare(args)
        else:
            measure(name, args)
        if args.out == FOLDER:
            tell()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--model", type=Path, required=True, help="directory of a cross-encoder")
    parser.add_argument("--pairs", type=Path, required=True, help="Parquet: query, passage")
    parser.add_argument("--qrels", type=Path, help="judgments in TREC's format, for the comparison")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the tables")
    parser.add_argument("--sample", type=int, default=4000, help="pairs of the comparison")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the comparison; runs of a start")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders of the comparison")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows of the other parts; to try out")
    args = parser.parse_args()
    if unknown := set(args.parts) - {*NAMES}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: the parts are {', '.join(NAMES)}")
    args.parts = args.parts or [*NAMES]
    return args


def make_environments(only: list[str]) -> None:
    """Make the environments of the chosen peers, so that the comparison only measures."""
    scripts = [each.script for each in CONTENDERS if not only or each.name in only]
    for script in dict.fromkeys(scripts):
        try:
            python_for(ROOT / "benchmarks" / "peers" / script)
        except CannotInstall as error:
            print(f"{script}: {error}", file=sys.stderr)


def compare(args: argparse.Namespace) -> None:
    """Run the comparison, or continue the one in the folder if that has this commit and this many pairs."""
    command = [sys.executable, "-m", "benchmarks.compare", "--model", args.model, "--pairs", args.pairs]
    command += ["--qrels", args.qrels] if args.qrels else []
    command += ["--sample", args.sample, "--repeats", args.repeats, "--out", args.out]
    command += ["--only", *args.only] if args.only else []
    saved = args.out / "compare.json"
    asked = json.loads(saved.read_text())["asked"] if saved.exists() else {}
    same = f"({commit()})" in asked.get("rankmill", "") and asked["pairs"] == str(args.sample)
    command += ["--resume"] if same else []
    subprocess.run([*map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def measure(name: str, args: argparse.Namespace) -> None:
    """Make those measurements of a part that this commit and machine lack."""
    saved = args.out / "figures.json"
    found: dict[str, Figures] = json.loads(saved.read_text()) if saved.exists() else {}
    here = {"commit": commit(), "machine": machine(), "share": args.share}
    part = found.get(name, {})
    if any(part.get(key) != value for key, value in here.items()):
        part = {**here, "date": f"{datetime.now(UTC):%Y-%m-%d}", "rows": {}}
    for step, run in PARTS[name].steps(args):
        if step in part["rows"]:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            part["rows"][step] = run(Path(folder))
        print(f"{name}: {step}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        found[name] = part
        saved.write_text(json.dumps(found, indent=1) + "\n")
        write(found, args.out)


def write(found: dict[str, Figures], folder: Path) -> None:
    """The page and the plots of all parts."""
    (folder / "figures.md").write_text(page(found))
    for name, part in found.items():
        plotted = PARTS[name].plotted
        bars = [(step, row[plotted], True) for step, row in part["rows"].items()]
        bar_chart(folder / f"{name}.svg", bars, unit=plotted, marks={})


def page(found: dict[str, Figures]) -> str:
    """The page in Markdown."""
    parts = ["# Figures of one machine", "Made by `make figures`."]
    for name, kind in PARTS.items():
        if not (part := found.get(name)):
            continue
        header = list(dict.fromkeys(figure for row in part["rows"].values() for figure in row))
        rows = [[step, *(_shown(row.get(figure)) for figure in header)] for step, row in part["rows"].items()]
        of = part["machine"]
        parts += [
            f"## {name.capitalize()}",
            kind.about
            + (f" **Tried out with {part['share']:.1%} of the rows.**" if part["share"] < 1 else ""),
            f"Commit {part['commit']}, {part['date']}; {of['CPU']}, {of['cores']} cores, "
            f"{of['instruction sets']}; {of['system']}.",
            markdown_table(["", *header], rows),
            f"![{kind.plotted}]({name}.svg)",
        ]
    return "\n\n".join(parts) + "\n"


def _shown(figure: object) -> str:
    if isinstance(figure, float):
        return f"{figure:,.1f}" if figure < 1000 else f"{figure:,.0f}"
    return f"{figure:,}" if isinstance(figure, int) else str("-" if figure is None else figure)


def feed_steps(args: argparse.Namespace) -> Steps:
    """Three runs with the fast tokenizer library, and one of fewer pairs without it."""
    for run in range(1, 4):
        rows = max(int(1_000_000 * args.share), 5000)
        yield f"fast tokenizer, run {run}", partial(feed, args, ("--rows", str(rows)))
    rows = max(int(30_000 * args.share), 5000)
    yield "tokenizers", partial(feed, args, ("--rows", str(rows), "--slow"))


def feed(args: argparse.Namespace, options: tuple[str, ...], folder: Path) -> Figures:
    """What one run of ``benchmarks.feed`` prints."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.feed",
        "--model",
        str(args.model),
        "--pairs",
        str(args.pairs),
    ]
    done = subprocess.run([*command, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return {name.replace("_", " "): figure for name, figure in found.items()}


def start_steps(args: argparse.Namespace) -> Steps:
    """The time of score-file for one pair, from the call to its end."""
    model = str(args.model.resolve())
    yield "the given model, nothing kept", partial(start, model, args, kept=False)
    yield "the given model, its graph kept", partial(start, model, args, kept=True)
    yield "demo", partial(start, "demo", args, kept=True)


def start(model: str, args: argparse.Namespace, folder: Path, *, kept: bool) -> Figures:
    """Seconds of each run, with what the first run has kept or with an empty cache."""
    one = folder / "one.parquet"
    pq.write_table(pq.read_table(args.pairs).slice(0, 1), one)
    score_file = str(Path(sys.executable).parent / "score-file")
    seconds = []
    for run in range(args.repeats + kept):
        cache = {"RANKMILL_CACHE_DIR": str(folder / ("cache" if kept else f"cache-{run}"))}
        command = [score_file, str(one), "--model", model, "-q", "-o", str(folder / f"{run}.parquet")]
        began = time.perf_counter()
        subprocess.run(command, check=True, env=os.environ | cache)
        seconds.append(time.perf_counter() - began)
    seconds = seconds[kept:]
    return {"seconds": median(seconds), "least": min(seconds), "most": max(seconds)}


def memory_steps(args: argparse.Namespace) -> Steps:
    """Files of growing size."""
    for rows in (100_000, 1_000_000):
        yield f"{rows:,} rows", partial(memory, int(rows * args.share))


def memory(rows: int, folder: Path) -> Figures:
    """Peak memory while a file of `rows` short rows is scored."""
    model = random_bert(folder / "model", hidden=8, layers=1, heads=1, positions=32)
    producer, server = peaks(write_rows(folder / "rows.parquet", rows), model)
    return {"score-file, MiB": producer, "server, MiB": server}


def fault_steps(args: argparse.Namespace) -> Steps:
    """The scenarios of ``benchmarks.faults.chaos``."""
    for name, scenario in SCENARIOS.items():
        kills = max(int(scenario.kills * args.share), 1)
        yield name, partial(fault, name, int(scenario.rows * args.share), kills)


def fault(name: str, rows: int, kills: int, folder: Path) -> Figures:
    """The figures of a scenario that the documents show."""
    found = SCENARIOS[name].run(folder, rows, kills, 1)
    harm = [f"rows {what}" for what in ("lost", "doubled", "moved", "different")]
    shown = ("kills", "rows", *harm, "seconds", "seconds undisturbed")
    return {figure: found[figure] for figure in shown if figure in found}


PARTS = {
    "feed": Part(
        feed_steps,
        "A run with a real tokenizer and a device that answers at once (`benchmarks.feed`); CPU in µs.",
        "pairs per second",
    ),
    "start": Part(start_steps, "score-file on one pair, start to exit: median, least, most.", "seconds"),
    "memory": Part(
        memory_steps, "Peak memory while a file is scored (`benchmarks.memory`).", "score-file, MiB"
    ),
    "faults": Part(
        fault_steps,
        "A file scored undisturbed and with kills at random moments, row by row (`benchmarks.faults.chaos`).",
        "seconds",
    ),
}
NAMES = ("peers", "compare", *PARTS)


def tell() -> None:
    """Write the comparison's result into README.md and docs/explanation/benchmarks.md."""
    results = from_json(json.loads((FOLDER / "compare.json").read_text()))
    if results.date:  # otherwise the comparison is old, and lacks figures
        for path, written in told(results).items():
            path.write_text(written)


def told(results: Results) -> dict[Path, str]:
    """README.md and docs/explanation/benchmarks.md as they should be after a comparison."""
    readme, explained = ROOT / "README.md", ROOT / "docs" / "explanation" / "benchmarks.md"
    times = results.times(SCORE_FILE, results.baseline())
    if times is None:
        return {}  # one of the two did not run
    once = re.sub(r"\[[\d.]+ times as fast\]", f"[{times:.1f} times as fast]", readme.read_text())
    return {
        readme: _between(once, sentence(results, times)),
        explained: _between(explained.read_text(), row(results, times)),
    }


def _between(text: str, made: str) -> str:
    """The text with `made` between the marks of this module."""
    marks = r"(<!-- make figures -->\n).*?(<!-- end -->)"
    return re.sub(marks, lambda found: f"{found[1]}{made}\n{found[2]}", text, flags=re.S)


def sentence(results: Results, over_usual: float) -> str:
    """The result for README.md."""
    of, best = results.machine, results.fastest_peer(EXACT)
    threads, newest = re.findall(r"\d+", of["cores"])[-1], of["instruction sets"].rpartition(", ")[2]
    lines = [
        f"{threads} threads of an {of['CPU']} with {newest}, {results.asked['model']}, "
        f"{results.pairs:,} pairs of MS MARCO, all tools in turn",
        f"([table](docs/benchmarks/compare.md), {results.date}, commit {results.commit}). score-file in "
        f"{results.precision(SCORE_FILE)} is {over_usual:.1f} times as fast as",
        f"{results.baseline().title}, which is what people run",
    ]
    if best:
        lines[-1] += f", and {number(results.times(SCORE_FILE, best), '.2f')} times as fast as"
        lines.append(f"{best.title}, the fastest other tool that ranks as fp32 does")
    return "\n".join(lines) + "."


def row(results: Results, over_usual: float) -> str:
    """The result for docs/explanation/benchmarks.md."""
    exact, eight = results.fastest_peer(EXACT), results.fastest_peer(EIGHT_BIT)
    int8 = results.times(SCORE_FILE_INT8, eight)
    header = ["machine", "commit, date", "pairs", f"over {results.baseline().title}"]
    header += [f"over the fastest {EXACT} peer", f"int8 over the fastest {EIGHT_BIT} peer"]
    cells = [
        f"{results.machine['CPU']}, {results.precision(SCORE_FILE)}",
        f"{results.commit}, {results.date}",
        f"{results.pairs:,}",
        f"{over_usual:.2f}",
        f"{number(results.times(SCORE_FILE, exact), '.2f')} ({exact.title})" if exact else "-",
        f"{int8:.2f} ({eight.title})" if eight and int8 else "-",
    ]
    parts = ", ".join(PARTS).capitalize()
    others = f"\n\n[{parts}](../benchmarks/figures.md) are in a table that names its machine."
    return markdown_table(header, [cells]) + (others if (FOLDER / "figures.md").exists() else "")


if __name__ == "__main__":
    main()
