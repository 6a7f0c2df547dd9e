"""Measures on this GPU everything that is claimed of GPUs, which are scores, speeds and faults.

    python -m benchmarks.gpu --out DIR

The command takes at most ten minutes (``--minutes``) and no network; models have the shapes of rerankers and
random weights. It writes ``gpu.md`` (tables, and a verdict for each goal), ``gpu.svg`` and ``gpu.json``,
again after each step, so that an end too soon leaves what was measured. On a CPU the command only tries
itself, with small models and few pairs, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comparison.report import bar_chart, machine
from benchmarks.gpu import faults
from benchmarks.gpu.command import Command, run_command, write_pairs
from benchmarks.gpu.ways import (
    PEER,
    SHAPES,
    Pairs,
    Speed,
    alone,
    device_precision,
    differences,
    gpu_name,
    loaded,
    made,
    matrix_tflops,
    pairs_for,
    peer,
    speeds,
)
from rankmill.extensions.lab.machine import markdown_table
from rankmill.jobs.runtime.hosts import thread_environ
from rankmill.jobs.runtime.limits import cores
from rankmill.workers.backends.auto import backends
from rankmill.workers.backends.base import Logits
from rankmill.workers.host.device import resolve_device

GOAL = 100_000
"""Pairs a second of MiniLM-L6 on an H100."""

COMMAND_SECONDS, STEADY_SHARE = 17, 0.85
"""Seconds of score-file for a million pairs of MiniLM-L6 on a host that knows it; its steady rate over the
rate of the forwards."""

STEPS = ("scores", "speeds", "together", "memory", "kill", "command")
IN_FP8 = ("Qwen3-0.6B",)
"""Shapes that are measured in fp8 as well."""

SLOWEST = ("DeBERTa-v3-base",)
"""Shapes whose scores are compared, but whose speed is not measured: they are never packed."""

PROVEN = 48
"""Pairs that are scored on the device and, each by itself, on the CPU in fp32."""


@dataclass
class Found:
    """What was measured so far; ``notes`` say what was left out, and why."""

    machine: dict[str, str]
    device: str
    precision: str
    matrix_tflops: float | None = None
    scores: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    speeds: dict[str, dict[str, Speed]] = field(default_factory=dict)
    together: dict[int, float] = field(default_factory=dict)
    memory: str | None = None
    kill: dict[str, object] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    environ = thread_environ(cores())
    if any(os.environ.get(name) != value for name, value in environ.items()):  # read at the import of PyTorch
        again = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **environ})
    device = resolve_device("auto")
    found = Found({**machine(), "host": platform.machine()}, gpu_name(device), device_precision(device))
    with tempfile.TemporaryDirectory() as folder:
        Measurement(found, device, Path(folder), args.out, 60 * args.minutes).run(args.only, args.shapes)
    print(report(found))
    if any(verdict.startswith("missed") for _, _, verdict in verdicts(found)):
        sys.exit("a goal was missed")


class Measurement:
    """The steps, one after the other, within the time.

    Parameters
    ----------
    found
        Where figures go.
    device
        ``cuda`` or ``cpu``.
    folder, out
        For models, and for the report.
    seconds
        No step begins after so many.
    """

    def __init__(self, found: Found, device: str, folder: Path, out: Path, seconds: float) -> None:
        self.found, self.device, self.folder, self.out = found, device, folder, out
        self.small = device == "cpu"
        self.end = time.monotonic() + seconds
        self.exact: dict[str, Logits] = {}

    def run(self, steps: list[str], shapes: list[str]) -> None:
        """All steps; what fails is noted, and the others go on."""
        self._step("matrix products", self._matrix)
        for name in shapes:
            self._step(name, partial(self._shape, name, steps, self.found.precision))
            if name in IN_FP8:
                self._step(f"{name}, fp8", partial(self._in_fp8, name, steps))
        model = self.folder / "model" / shapes[0]
        if "together" in steps:
            self._step("workers on one device", lambda: self._together(model))
        if "memory" in steps:
            self._step("memory", lambda: self._memory(model))
        if "kill" in steps:
            self._step("SIGKILL", lambda: self._kill(model))
        if "command" in steps:
            for processes in (1, 2) if self.small else (1, 1, 2, 3):
                known = bool(self.found.commands)
                run = partial(self._command, model, processes, known)
                self._step(f"score-file with {processes} {'known' if known else 'cold'}", run)

    def _step(self, name: str, run: Callable[[], None]) -> None:
        if time.monotonic() > self.end:
            self._note(f"{name}: left out, the time is over")
            return
        started = time.monotonic()
        try:
            run()
        except (Exception, SystemExit) as error:  # the latter if score-file fails
            self._note(f"{name}: {type(error).__name__}: {error}")
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        self._write()

    def _note(self, text: str) -> None:
        self.found.notes.append(text)
        print(text, file=sys.stderr, flush=True)

    def _write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu.json").write_text(json.dumps(asdict(self.found), indent=1), encoding="utf-8")
        (self.out / "gpu.md").write_text(report(self.found), encoding="utf-8")
        if bars := _bars(self.found):
            bar_chart(self.out / "gpu.svg", bars, unit="pairs/s", marks={})

    def _matrix(self) -> None:
        self.found.matrix_tflops = matrix_tflops(self.device)

    def _in_fp8(self, name: str, steps: list[str]) -> None:
        if lacking := backends()["torch"].lacks(self.device, "fp8"):
            self._note(f"{name}, fp8: {lacking}")
        else:
            self._shape(name, steps, "fp8", f"{name}, fp8")

    def _shape(self, name: str, steps: list[str], precision: str, row: str = "") -> None:
        """Measure a shape in a precision; its figures are in a row of that name, or of the shape's."""
        row = row or name
        model = made(name, self.folder / "model" / name, small=self.small)
        cache = self.folder / "cache"
        engine = loaded(model, self.device, precision, cache)
        if "scores" in steps:
            pairs = pairs_for(name, self.folder, 12 if self.small else PROVEN)
            if name not in self.exact:
                self.exact[name] = alone(loaded(model, "cpu", "fp32", cache), pairs)
            exact = self.exact[name]
            self.found.scores[row] = differences(engine, pairs, exact)
            if row == name:  # the peer has 16 bits, so it does not compare with 8
                self._peer_scores(name, model, pairs, exact)
        if "speeds" in steps and name not in SLOWEST:
            large = name == "MiniLM-L6"
            count = 24 if self.small else 32_768 if large else 4096
            pairs = pairs_for(name, self.folder, count)
            found = speeds(engine, model, pairs, 1 if self.small else 3, self._note)
            self.found.speeds[row] = found

    def _peer_scores(self, name: str, model: Path, pairs: Pairs, exact: Logits) -> None:
        try:
            theirs = peer(model, self.device)(pairs)
            self.found.scores[name][PEER] = float(abs(theirs - exact).max()), 1.0
        except Exception as error:  # another library may raise anything
            self._note(f"{name}: {PEER} cannot run: {type(error).__name__}: {str(error)[:200]}")

    def _together(self, model: Path) -> None:
        for workers in (1, 2):
            self.found.together[workers] = faults.together(
                model, self.device, workers, 1.0 if self.small else 8.0
            )

    def _memory(self, model: Path) -> None:
        if self.small:
            self._note("memory: not tried on a CPU, whose memory is the machine's")
            return
        engine = loaded(model, self.device, self.found.precision, self.folder / "cache")
        pairs = pairs_for("MiniLM-L6", self.folder, 256)
        self.found.memory = faults.memory_survived(engine, pairs) or "survived"

    def _command(self, model: Path, processes: int, known: bool) -> None:
        folder, rows = self.folder / "command", 400 if self.small else 1_000_000
        source = folder / "pairs.parquet"
        if not source.exists():
            folder.mkdir()
            write_pairs(source, rows)
        done = run_command(model, source, rows, folder, device=self.device, processes=processes, known=known)
        self.found.commands.append(done)

    def _kill(self, model: Path) -> None:
        rows = 2000 if self.small else 200_000
        self.found.kill = faults.killed_in_a_forward(
            model, self.folder, rows, 1 if self.small else 3, self.device
        )


def _bars(found: Found) -> list[tuple[str, float, bool]]:
    return [
        (f"{name}, {way}", speed.whole, way != PEER)
        for name, ways in found.speeds.items()
        for way, speed in ways.items()
        if speed.whole
    ]


def report(found: Found) -> str:
    """The report in Markdown."""
    peak = found.matrix_tflops
    scores = [
        (name, way, f"{off:.2g}", "" if way == PEER else f"{spearman:.4f}")
        for name, ways in found.scores.items()
        for way, (off, spearman) in ways.items()
    ]
    rows = [
        (name, way, _number(speed.forwards), _number(speed.whole), _number(speed.host, 1),
         f"{speed.tflops / peak:.0%}" if speed.tflops and peak else "-")
        for name, ways in found.speeds.items()
        for way, speed in ways.items()
    ]  # fmt: skip
    facts = {**found.machine, "device": found.device, "precision": found.precision}
    if peak:
        facts["matrix products"] = f"{peak:.3g} TFLOP/s"
    parts: list[tuple[str, str]] = [
        ("Machine", markdown_table(("", ""), list(facts.items()))),
        ("Goals", markdown_table(("goal", "measured", "verdict"), verdicts(found))),
        (
            "Differences from fp32 on the CPU, each pair alone",
            markdown_table(("shape", "way", "largest difference of a logit", "Spearman"), scores),
        ),
        (
            "Pairs a second",
            markdown_table(
                ("shape", "way", "forwards", "with tokenizing", "host, µs a pair", "of matrix products"), rows
            ),
        ),
        ("score-file from Parquet to Parquet, MiniLM-L6", _command_table(found.commands)),
        ("Left out", "\n".join(f"- {note}" for note in found.notes) or "Nothing."),
    ]
    return "# On a GPU\n\n" + "\n\n".join(f"## {title}\n\n{text}" for title, text in parts) + "\n"


def verdicts(found: Found) -> list[tuple[str, str, str]]:
    """Each goal, what was measured, and whether it was reached."""
    return [
        ("scores differ from fp32 at most twice as much as those of " + PEER, *_scores_verdict(found)),
        (f"MiniLM-L6: {GOAL:,} pairs/s (forwards)", *_speed_verdict(found)),
        *(
            (f"{name}: faster than {PEER}", *_peer_verdict(found, ways))
            for name, ways in found.speeds.items()
        ),
        ("two workers on one device: not slower than one", *_together_verdict(found)),
        ("memory that runs out costs no row", *_known(found.memory, found.memory == "survived")),
        ("a SIGKILL in a forward costs no row", *_kill_verdict(found)),
        (f"score-file, a million pairs, known: {COMMAND_SECONDS} s", *_command_verdict(found)),
        (f"its steady rate over the forwards': {STEADY_SHARE}", *_steady_verdict(found)),
    ]


def _known(measured: object, reached: bool) -> tuple[str, str]:
    return ("-", "not measured") if measured is None else (str(measured), "reached" if reached else "missed")


def _scores_verdict(found: Found) -> tuple[str, str]:
    worst: tuple[float, str] | None = None
    for name, ways in found.scores.items():
        own = max(ways.get(PEER, (0.0, 0.0))[0], 1e-4)
        for way, (off, _) in ways.items():
            if way != PEER and PEER in ways:
                worst = max(worst or (0.0, ""), (off / own, f"{name}, {way}"))
    if worst is None:
        return _known(None, reached=False)
    return _known(f"{worst[0]:.2f} times ({worst[1]})", worst[0] <= 2)


def _speed_verdict(found: Found) -> tuple[str, str]:
    ways = found.speeds.get("MiniLM-L6")
    best = max((speed.forwards or 0.0 for speed in ways.values()), default=0.0) if ways else None
    return _of_a_gpu(found, f"{best:,.0f}" if best else None, bool(best and best >= GOAL))


def _of_a_gpu(found: Found, measured: str | None, reached: bool) -> tuple[str, str]:
    """The verdict on a speed, which nothing but a GPU can show."""
    return (measured or "-", "no GPU") if found.device == "cpu" else _known(measured, reached)


def _peer_verdict(found: Found, ways: dict[str, Speed]) -> tuple[str, str]:
    theirs = ways[PEER].whole if PEER in ways else None
    ours = max((speed.whole or 0.0 for way, speed in ways.items() if way != PEER), default=0.0)
    return _of_a_gpu(found, f"{ours / theirs:.2f} times" if theirs else None, bool(theirs and ours > theirs))


def _together_verdict(found: Found) -> tuple[str, str]:
    one, two = found.together.get(1), found.together.get(2)
    ratio = two / one if one and two else None
    return _of_a_gpu(found, f"{ratio:.2f} times" if ratio else None, bool(ratio and ratio > 0.95))


def _kill_verdict(found: Found) -> tuple[str, str]:
    kill: dict[str, Any] = found.kill
    if not kill:
        return _known(None, reached=False)
    whole = not (kill["lost"] or kill["doubled"] or kill["moved"]) and kill["kills"] > 0
    said = f"{kill['kills']} kills, {kill['lost']} of {kill['rows']:,} rows lost"
    return _known(said, whole and kill["largest difference of a score"] < 1e-3)


def _command_verdict(found: Found) -> tuple[str, str]:
    seconds = min((each.seconds for each in found.commands if each.known), default=None)
    return _of_a_gpu(
        found, f"{seconds:.1f} s" if seconds else None, bool(seconds and seconds <= COMMAND_SECONDS)
    )


def _steady_verdict(found: Found) -> tuple[str, str]:
    forwards = max(
        (speed.forwards or 0.0 for speed in found.speeds.get("MiniLM-L6", {}).values()), default=0.0
    )
    steady = max((each.steady for each in found.commands), default=0.0)
    share = steady / forwards if forwards and steady else None
    return _of_a_gpu(found, f"{share:.2f}" if share else None, bool(share and share >= STEADY_SHARE))


def _command_table(commands: list[Command]) -> str:
    rows = [
        (str(each.processes), "known" if each.known else "cold", f"{each.rows:,}", f"{each.seconds:.1f}",
         f"{each.startup:.1f}", f"{each.load:.1f}", _number(each.first, 1), f"{each.early:,}",
         _number(each.steady), "-" if each.busy is None else f"{each.busy:.0%}", f"{each.worker_us:.1f}",
         f"{each.producer_us:.1f}")
        for each in commands
    ]  # fmt: skip
    titles = (
        "processes", "model", "pairs", "seconds", "until a worker", "until the model", "first scores",
        "rows after 10 s", "steady, pairs/s", "device busy", "workers, µs a pair", "score-file, µs a pair",
    )  # fmt: skip
    return markdown_table(titles, rows) if rows else "Not measured."


def _number(figure: float | None, digits: int = 0) -> str:
    return "-" if figure is None else f"{figure:,.{digits}f}"


if __name__ == "__main__":
    main()
