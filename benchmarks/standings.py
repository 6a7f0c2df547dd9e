"""From the raw runs of a comparison to its table, its ratios and the goals met or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.ceiling import Ceiling
from benchmarks.contenders import CONTENDERS, ENGINE, FP16, FP32, SCORE_FILE, Contender, Run
from rankmill.tuning.machine import markdown_table

NOTHING = "-"


@dataclass
class Results:
    """Everything a comparison measured; `asked` says of what, and two with the same `asked` can be joined.

    ``quality`` holds for each contender ``spearman`` (against fp32) and, with judgments, ``ndcg``.
    """

    asked: dict[str, str]
    machine: dict[str, str]
    ceilings: list[Ceiling] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    quality: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """How many pairs each run scored."""
        return int(self.asked["pairs"])

    def of(self, contender: Contender) -> list[Run]:
        """The contender's runs, in order."""
        return [run for run in self.runs if run.name == contender.name]

    def speeds(self, contender: Contender) -> list[float]:
        """Pairs a second of each of its runs that came to an end."""
        return [self.pairs / run.seconds for run in self.of(contender) if not run.failure]

    def speed(self, contender: Contender) -> float | None:
        """Their median."""
        speeds = self.speeds(contender)
        return median(speeds) if speeds else None

    def ceiling(self) -> float:
        """Pairs a second at the precision that is fastest here: the median of the rounds."""
        return median(max(each.pairs_per_second.values()) for each in self.ceilings)

    def fastest_peer(self) -> Contender | None:
        """The one to beat."""
        peers = [each for each in CONTENDERS if not each.ours and self.speed(each)]
        return max(peers, key=lambda each: self.speed(each) or 0.0, default=None)

    def baseline(self) -> Contender:
        """What people run: fp16 on a GPU, fp32 on a CPU."""
        return FP16 if "GPU" in self.machine else FP32


def standings(results: Results) -> str:
    """The results in Markdown: the machine, the table, the goals."""
    facts = [f"| {label} | {value} |" for label, value in (results.machine | results.asked).items()]
    last = results.ceilings[-1]
    tflops = ", ".join(
        f"{name} {median(each.tflops[name] for each in results.ceilings):.2f}" for name in last.tflops
    )
    parts = [
        "# rankmill beside its peers",
        "Made by `python -m benchmarks.compare`; [BENCHMARKS.md](../BENCHMARKS.md) explains the columns.",
        "\n".join(["| | |", "| --- | --- |", *facts]),
        "## Speed",
        speed_table(results),
        f"The ceiling: matrix products alone reach {tflops} TFLOP/s; at {last.gflop:.2f} GFLOP in the linear "
        f"layers for a pair of {last.tokens:.0f} tokens that is **{results.ceiling():,.0f} pairs/s**.",
        "![Pairs a second of each contender](compare.svg)",
        "\n".join(goals(results)),
        "## Quality",
        quality_table(results),
        "## Settings",
        settings_table(results),
        failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def speed_table(results: Results) -> str:
    """A line for each contender that ran."""
    best, usual = results.fastest_peer(), results.baseline()
    rows = []
    for contender in CONTENDERS:
        speed, speeds = results.speed(contender), results.speeds(contender)
        if speed is None:
            continue
        runs = [run for run in results.of(contender) if not run.failure]
        rows.append(
            [
                f"**{contender.title}**" if contender.ours else contender.title,
                f"{speed:,.0f}",
                f"{min(speeds):,.0f}-{max(speeds):,.0f}",
                times(speed, results.speed(usual)),
                times(speed, results.speed(best) if best else None),
                f"{speed / results.ceiling():.0%}",
                f"{median(run.load_seconds for run in runs):.1f}",
            ]
        )
    header = ["", "pairs/s", "range", "x what people run", "x fastest peer", "of ceiling", "start, s"]
    return markdown_table(header, rows)


def quality_table(results: Results) -> str:
    """Agreement with fp32, and nDCG@10 where there are judgments."""
    base = results.quality.get(FP32.name, {})
    rows = []
    for contender in CONTENDERS:
        found = results.quality.get(contender.name)
        if found is None:
            continue
        row = [contender.title, number(found.get("spearman"), ".5f"), number(found.get("ndcg"), ".4f")]
        both = "ndcg" in found and "ndcg" in base
        rows.append([*row, number(found["ndcg"] - base["ndcg"], "+.4f") if both else NOTHING])
    return markdown_table(["", "Spearman with fp32", "nDCG@10", "less fp32's"], rows)


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
    """A line for each goal whose figures are there."""
    file = results.speed(SCORE_FILE)
    if not file:
        return []
    best, usual = results.fastest_peer(), results.baseline()
    on_gpu = usual is FP16
    lines = []
    if on_gpu:
        lines.append(goal("score-file, pairs/s", file, 100_000))
    elif best and (speed := results.speed(best)):
        lines.append(goal(f"score-file, times the fastest peer ({best.title})", file / speed, 2.2))
    if speed := results.speed(usual):
        lines.append(goal(f"score-file, times {usual.title}", file / speed, 10 if on_gpu else 6))
    if speed := results.speed(ENGINE):
        lines.append(goal("score-file, share of Engine.score", file / speed, 0.95))
    return lines


def failures(results: Results) -> str:
    """A line for each contender that could not take part."""
    first = {run.name: run.failure for run in reversed(results.runs) if run.failure}
    return "\n".join(
        f"- {each.title}: did not run: {first[each.name]}" for each in CONTENDERS if each.name in first
    )


def goal(what: str, reached: float, wanted: float) -> str:
    """A goal that is a figure to be reached."""
    return f"- {what}: {reached:,.2f}, goal {wanted:,.2f}: **{'met' if reached >= wanted else 'not met'}**"


def times(speed: float, other: float | None) -> str:
    """How many times as fast."""
    return f"{speed / other:.2f}" if other else NOTHING


def number(value: float | None, form: str) -> str:
    """A figure, or a dash for one that is not there."""
    return NOTHING if value is None else format(value, form)


def from_json(data: dict[str, Any]) -> Results:
    """Results as they were written."""
    return Results(
        asked=data["asked"],
        machine=data["machine"],
        ceilings=[Ceiling(**each) for each in data["ceilings"]],
        runs=[Run(**each) for each in data["runs"]],
        quality=data["quality"],
    )
