"""Makes the table and the ratios of a comparison's results, and says whether the goals are met."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.comparison.contenders import (
    CONTENDERS,
    ENGINE,
    ENGINE_INT8,
    FP16,
    FP32,
    SCORE_FILE,
    SCORE_FILE_INT8,
    Contender,
    Run,
)
from benchmarks.engine.ceiling import Ceiling
from rankmill.extensions.lab.machine import markdown_table

NOTHING = "-"

EXACT, EIGHT_BIT = "exact", "8-bit"
"""The classes within which contenders are compared."""

_MOST_OVER_CEILING = 1.1
"""A ceiling that a contender exceeds by more than this factor is not one, because the measured library was
not fast at that arithmetic on that machine.
"""

EXACT_SPEARMAN = 0.999
"""Rank correlation with fp32 from which on a contender is exact."""


@dataclass
class Results:
    """All runs of a comparison. `asked` identifies it: comparisons with the same `asked` can be joined.

    ``quality`` holds for each contender ``spearman`` (against fp32), its interval (``low``, ``high``),
    ``top_overlap``, and, with judgments, ``ndcg``.
    """

    asked: dict[str, str]
    machine: dict[str, str]
    date: str = ""
    ceilings: list[Ceiling] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    quality: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        return int(self.asked["pairs"])

    @property
    def commit(self) -> str:
        return self.asked["rankmill"].partition("(")[2].rstrip(")")

    def of(self, contender: Contender) -> list[Run]:
        return [run for run in self.runs if run.name == contender.name]

    def speeds(self, contender: Contender) -> list[float]:
        """Pairs a second of each run of the contender that ended well."""
        return [self.pairs / run.seconds for run in self.of(contender) if not run.failure]

    def speed(self, contender: Contender) -> float | None:
        speeds = self.speeds(contender)
        return median(speeds) if speeds else None

    def times(self, one: Contender, other: Contender | None) -> float | None:
        """How many times as fast as the other `one` is, as the median over the rounds in which both ran. A
        machine's speed changes from round to round, but both are timed in turn within a round.
        """
        if other is None:
            return None
        seconds = {run.round: run.seconds for run in self.of(one) if not run.failure}
        ratios = [
            run.seconds / seconds[run.round]
            for run in self.of(other)
            if not run.failure and run.round in seconds
        ]
        return median(ratios) if ratios else None

    def ceilings_by_precision(self) -> dict[str, float]:
        """Pairs a second that the matrix products of each arithmetic allow, as medians of the rounds."""
        names = self.ceilings[-1].pairs_per_second if self.ceilings else ()
        return {name: median(each.pairs_per_second[name] for each in self.ceilings) for name in names}

    def precision(self, contender: Contender) -> str:
        """The arithmetic of the contender's matrix products, whichever kind of int8; empty if not known."""
        said = next((run.precision for run in reversed(self.of(contender)) if not run.failure), "")
        return re.split("[ -]", said)[0]

    def spearman(self, contender: Contender) -> float | None:
        """The contender's rank correlation with fp32; ``None`` if it was not measured."""
        return self.quality.get(contender.name, {}).get("spearman")

    def class_of(self, contender: Contender) -> str | None:
        """The contender's class: 8-bit by its arithmetic; else exact if it ranks this sample as fp32 does."""
        if self.precision(contender) == "int8":
            return EIGHT_BIT
        spearman = self.spearman(contender)
        return EXACT if spearman is not None and spearman >= EXACT_SPEARMAN else None

    def fastest_peer(self, of_class: str | None) -> Contender | None:
        peers = [each for each in CONTENDERS if not each.ours and self.speed(each)]
        rivals = [each for each in peers if of_class is not None and self.class_of(each) == of_class]
        return max(rivals, key=lambda each: self.speed(each) or 0.0, default=None)

    def baseline(self) -> Contender:
        """What people run: sentence-transformers in fp16 on a GPU, in fp32 on a CPU."""
        return FP16 if "GPU" in self.machine else FP32


def standings(results: Results) -> str:
    """The results in Markdown, with the machine, the tables and the goals."""
    facts = [
        f"| {label} | {value} |"
        for label, value in (results.machine | results.asked | {"date": results.date}).items()
    ]
    last = results.ceilings[-1]
    rates = {name: median(each.tflops[name] for each in results.ceilings) for name in last.tflops}
    ceilings = ", ".join(
        f"{name} {rates[name]:.2f} TFLOP/s, **{speed:,.0f} pairs/s**{_by(last.libraries.get(name))}"
        for name, speed in results.ceilings_by_precision().items()
    )
    parts = [
        "# rankmill beside its peers",
        "Made by `python -m benchmarks.compare`; [benchmarks](../explanation/benchmarks.md) "
        "explains the columns.",
        "\n".join(["| | |", "| --- | --- |", *facts]),
        "## Speed",
        speed_table(results),
        f"Classes: *{EIGHT_BIT}* is what multiplies 8-bit numbers; of the others, *{EXACT}* is what ranks "
        f"these pairs as {FP32.title} does (Spearman within a query at least {EXACT_SPEARMAN}).",
        f"The ceilings, matrix products alone, at {last.gflop:.2f} GFLOP in the linear layers for a pair of "
        f"{last.tokens:.0f} tokens: {ceilings}. Each row's share is of the one of its own arithmetic.",
        "![Pairs a second of each contender](compare.svg)",
        "\n".join(goals(results)),
        "## Quality",
        quality_table(results),
        "## Settings",
        settings_table(results),
        failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _by(library: str | None) -> str:
    return f" ({library})" if library else ""


def speed_table(results: Results) -> str:
    """A line for each contender that ran."""
    usual, ceilings = results.baseline(), results.ceilings_by_precision()
    rows = []
    for contender in CONTENDERS:
        speed, speeds = results.speed(contender), results.speeds(contender)
        if speed is None:
            continue
        runs = [run for run in results.of(contender) if not run.failure]
        kind, precision = results.class_of(contender), results.precision(contender)
        best, ceiling = results.fastest_peer(kind), ceilings.get(precision)
        rows.append(
            [
                f"**{contender.title}**" if contender.ours else contender.title,
                kind or NOTHING,
                precision or NOTHING,
                f"{speed:,.0f}",
                f"{min(speeds):,.0f}-{max(speeds):,.0f}",
                number(results.times(contender, usual), ".2f"),
                number(results.times(contender, best), ".2f"),
                f"{speed / ceiling:.0%}" if ceiling and speed < _MOST_OVER_CEILING * ceiling else NOTHING,
                f"{median(run.load_seconds for run in runs):.1f}",
            ]
        )
    header = ["", "class", "products", "pairs/s", "range", "x what people run", "x fastest peer of its class"]
    return markdown_table([*header, "of ceiling", "start, s"], rows)


def quality_table(results: Results) -> str:
    """Agreement with fp32 (`rankmill.extensions.lab.agreement`), and nDCG@10 where there are judgments."""
    base = results.quality.get(FP32.name, {})
    rows = []
    for contender in CONTENDERS:
        found = results.quality.get(contender.name)
        if found is None:
            continue
        interval = f"{found['low']:.5f}-{found['high']:.5f}" if "low" in found else NOTHING
        row = [contender.title, number(found.get("spearman"), ".5f"), interval]
        row += [number(found.get("top_overlap"), ".1%"), number(found.get("ndcg"), ".4f")]
        both = "ndcg" in found and "ndcg" in base
        rows.append([*row, number(found["ndcg"] - base["ndcg"], "+.4f") if both else NOTHING])
    header = ["", "Spearman with fp32", "95% interval", "first 10 shared", "nDCG@10", "less fp32's"]
    return markdown_table(header, rows)


def settings_table(results: Results) -> str:
    """How each contender ran, and in which versions."""
    rows = []
    for contender in CONTENDERS:
        runs = [run for run in results.of(contender) if not run.failure]
        if runs:
            versions = ", ".join(f"{name} {found}" for name, found in runs[-1].versions.items())
            rows.append([contender.title, runs[-1].settings, versions])
    return markdown_table(["", "settings", "versions"], rows)


def goals(results: Results) -> list[str]:
    """A line for each goal whose figures were measured."""
    usual = results.baseline()
    on_gpu = usual is FP16
    lines = [] if on_gpu else class_goals(results)
    if on_gpu and (speed := results.speed(SCORE_FILE)):
        lines.append(goal("score-file, pairs/s", speed, 100_000))
    if on_gpu and (times := results.times(SCORE_FILE, usual)):
        lines.append(goal(f"score-file, times {usual.title}", times, 10))
    if share := results.times(SCORE_FILE, ENGINE):
        lines.append(goal("score-file, share of Engine.score", share, 0.95))
    return lines


def class_goals(results: Results) -> list[str]:
    """Lines that compare ours with the fastest peer of each class; int8 counts as what it turns out to be."""
    lines = []
    for ours, kind, wanted in (
        (SCORE_FILE, EXACT, 1.7),
        (ENGINE_INT8, EIGHT_BIT, 1.3),
        (SCORE_FILE_INT8, EIGHT_BIT, 1.3),
    ):
        best = results.fastest_peer(kind)
        if not results.speed(ours) or best is None:
            continue
        ranks = rank_beside(results, ours, best)
        if kind == EXACT and results.class_of(ours) != EXACT:
            lines.append(f"- {ours.title}: not {kind} on these pairs: **not met**")
        elif ranks == "worse":
            lines.append(f"- {ours.title}: ranks worse than {best.title}: **not met**")
        elif times := results.times(ours, best):
            what = (
                f"{ours.title} ({results.precision(ours)}), which ranks {ranks}, "
                f"times the fastest {kind} peer ({best.title})"
            )
            lines.append(goal(what, times, wanted))
    return lines


def rank_beside(results: Results, ours: Contender, peer: Contender) -> str:
    """Whether ours agrees ``better``, ``worse`` or ``as well`` with fp32 as a peer does.

    The two differ if the peer's Spearman lies outside the 95% interval of ours.
    """
    mine, other = results.quality.get(ours.name, {}), results.spearman(peer) or 0.0
    spearman = mine.get("spearman", 0.0)
    if other > mine.get("high", spearman):
        return "worse"
    return "better" if other < mine.get("low", spearman) else "as well"


def failures(results: Results) -> str:
    """A line for each contender that could not take part."""
    first = {run.name: run.failure for run in reversed(results.runs) if run.failure}
    return "\n".join(
        f"- {each.title}: did not run: {first[each.name]}" for each in CONTENDERS if each.name in first
    )


def goal(what: str, reached: float, wanted: float) -> str:
    """A line for a goal that is a figure to reach."""
    return f"- {what}: {reached:,.2f}, goal {wanted:,.2f}: **{'met' if reached >= wanted else 'not met'}**"


def number(value: float | None, form: str) -> str:
    """A figure as text; a dash if it is missing."""
    return NOTHING if value is None else format(value, form)


def from_json(data: dict[str, Any]) -> Results:
    """Read results that a comparison has written."""
    return Results(
        asked=data["asked"],
        machine=data["machine"],
        date=data.get("date", ""),
        ceilings=[Ceiling(**each) for each in data["ceilings"]],
        runs=[Run(**each) for each in data["runs"]],
        quality=data["quality"],
    )
