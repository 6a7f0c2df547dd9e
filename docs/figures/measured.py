"""Pictures of what was measured: each function draws one recording."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from docs.figures.svg import Picture

_BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def killed(found: dict[str, Any]) -> str:
    """A worker is killed, and what happens then."""
    rows, again = found["half_seconds"], min(found["again"])
    picture = Picture(
        860, 400, "A worker is killed, and nothing starts it again",
        f"{len(rows)} workers that take a millisecond for a pair, one run of {found['rows']:,} rows; pairs a second, each half second.\n"
        f"{found['machine']}",
    )  # fmt: skip
    left, right, top, lane = 96, 836, 96, 58
    scale = (right - left) / (len(rows[0]) / 2)

    def at(seconds: float) -> float:
        return left + scale * seconds

    for number, counts in enumerate(rows):
        base = top + lane * (number + 1) - 12
        dead = number == 2
        picture.text(left - 12, base - 12, f"worker {number + 1}", "bold", anchor="end")
        picture.line([(left, base), (right, base)], "grid")
        for place, count in enumerate(counts):
            if count:
                height = 34 * count / 512
                picture.box(at(place / 2), base - height, scale / 2 - 1, height, "b" if dead else "c")
    bottom = top + lane * len(rows)
    killed_base = top + lane * 3 - 12
    picture.box(at(found["kill"]), killed_base - 34, at(again) - at(found["kill"]), 34, "box", edge="bad")
    picture.text(
        (at(found["kill"]) + at(again)) / 2,
        killed_base - 13,
        "its lease runs out; the others score on",
        "soft",
        anchor="middle",
    )
    for seconds, words, anchor in (
        (found["kill"], "SIGKILL", "end"),
        (again, f"its {len(found['again'])} chunks run again", "start"),
    ):
        picture.line([(at(seconds), top - 14), (at(seconds), bottom)], "bad", dash="4 3")
        picture.text(
            at(seconds) + (6 if anchor == "start" else -6),
            top - 8,
            f"{words}, {seconds:.1f} s",
            "soft",
            anchor=anchor,
            fill="bad",
        )
    for seconds in range(0, int(found["end"]) + 1, 5):
        picture.text(at(seconds), bottom + 16, f"{seconds} s", "soft", anchor="middle")
    twice = found["computed"] - found["rows"]
    picture.text(
        20, bottom + 48,
        f"At the end: {found['rows']:,} scores for {found['rows']:,} rows, {found['without_score']} without a score, {found['wrong']} wrong;"
        f" {twice} pairs ({100 * twice / found['rows']:.1f}%) were computed twice.",
    )  # fmt: skip
    return str(picture)


def resume(found: dict[str, Any]) -> str:
    """Ctrl-C, and the same command again."""
    first, second = found["runs"]
    picture = Picture(
        860,
        380,
        "Ctrl-C, then the same command",
        f"Rows that are done of {found['rows']:,}; score-file with the demo model.\n{found['machine']}",
    )
    left, right, top, bottom = 70, 836, 84, 320
    across = (right - left) / second["end"]
    up = (bottom - top) / found["rows"]
    for rows in range(0, found["rows"] + 1, 1500):
        picture.line([(left, bottom - up * rows), (right, bottom - up * rows)], "grid")
        picture.text(left - 8, bottom - up * rows + 4, f"{rows:,}", "soft", anchor="end")
    for run, colour in ((first, "a"), (second, "c")):
        picture.line(
            [(left + across * seconds, bottom - up * rows) for seconds, rows in run["samples"]],
            colour,
            width=2.5,
        )
    kept = bottom - up * first["kept"]
    picture.line(
        [(left + across * first["stopped"], kept), (left + across * second["samples"][0][0], kept)],
        "soft",
        dash="4 3",
    )
    marks = (
        (first["stopped"], "Ctrl-C", "end", top + 40),
        (second["start"], "the same command", "start", top + 40),
        (second["end"], "complete", "end", bottom - 24),
    )
    for seconds, words, anchor, line in marks:
        x = left + across * seconds
        picture.line([(x, top), (x, bottom)], "bad" if words == "Ctrl-C" else "soft", dash="2 4")
        picture.text(x + (6 if anchor == "start" else -6), line, f"{words}, {seconds:.1f} s", anchor=anchor)
    for seconds in range(0, int(second["end"]) + 1, 5):
        picture.text(left + across * seconds, bottom + 18, f"{seconds} s", "soft", anchor="middle")
    picture.text(
        20, 362, f"Ctrl-C: exit code {first['code']}, {first['kept']:,} scored rows kept. The second command scored the other"
        f" {found['rows'] - second['resumed_rows']:,} and took {second['resumed_rows']:,} from the disk.",
    )  # fmt: skip
    return str(picture)


def requests(found: dict[str, Any]) -> str:
    """Requests beside bulk work."""
    picture = Picture(
        860, 300, "A request beside a bulk run",
        f"{len(found['idle'])} requests of 20 pairs each, one after the other, on one worker that takes a millisecond for a pair.\n{found['machine']}",
    )  # fmt: skip
    left, right = 190, 820
    most = 0.05 * (int(max(found["behind"]) / 0.05) + 1)

    def at(seconds: float) -> float:
        return left + (right - left) * seconds / most

    for step in range(int(most / 0.05) + 1):
        picture.line([(at(step * 0.05), 84), (at(step * 0.05), 232)], "grid")
        picture.text(at(step * 0.05), 250, f"{50 * step} ms", "soft", anchor="middle")
    for number, (name, words, colour) in enumerate(
        (("idle", "idle worker", "c"), ("behind", "behind a bulk run", "a"))
    ):
        line = 120 + 74 * number
        picture.text(left - 14, line + 4, words, "bold", anchor="end")
        for place, seconds in enumerate(found[name]):
            picture.dot(at(seconds), line - 16 + 4 * (place * 7 % 9), 3, colour)
        p95 = quantiles(found[name], n=20)[-1]
        for seconds, label, offset in ((median(found[name]), "median", -26), (p95, "p95", 34)):
            picture.line([(at(seconds), line - 20), (at(seconds), line + 20)], "text", width=1.5)
            picture.text(
                at(seconds), line + offset, f"{label} {1000 * seconds:.0f} ms", "soft", anchor="middle"
            )
    more = (quantiles(found["behind"], n=20)[-1] - quantiles(found["idle"], n=20)[-1]) / found["batch"]
    picture.text(
        20,
        282,
        f"At p95 a request waits {more:.2f} batches more: it comes next, after the batch that the model has begun.",
    )
    return str(picture)


def batches(found: dict[str, Any]) -> str:
    """How batches are cut."""
    lengths = found["lengths"]
    picture = Picture(
        860, 420, "How batches are cut",
        f"The {len(lengths)} pairs of the shipped example. A line is a pair; its colour is tokens, grey is padding. A gap is between two batches.",
    )  # fmt: skip
    halves = (
        ("plain", "In the input's order, 32 pairs each", 20),
        ("planned", f"By length, {found['budget']:,} padded tokens each", 440),
    )
    wide = 400 / max(lengths)
    for name, words, left in halves:
        cut = found[name]
        padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in cut)
        picture.text(left, 80, words, "bold")
        picture.text(
            left,
            98,
            f"{len(cut)} batches, {100 * sum(lengths) / padded:.0f}% of the computed tokens are real",
            "soft",
        )
        line = 112.0
        for batch in cut:
            longest = max(lengths[row] for row in batch)
            picture.box(left, line, wide * longest, 1.05 * len(batch), "pad")
            for row in batch:
                picture.box(left, line, wide * lengths[row], 1.05, "a")
                line += 1.05
            line += 4
    return str(picture)


def machines() -> str:
    """The speed on the machines whose tables docs/benchmarks has, and on two of which medians alone are kept."""
    tables = (
        ("compare.json", "AMD EPYC, two cores, avx512_bf16"),
        ("xeon/compare.json", "Intel Xeon, two cores, without AMX"),
        ("amx/compare.json", "Intel Xeon, two cores, AMX; int8 is bf16 there"),
        ("avx2-exact/compare.json", "AMD EPYC, two cores, AVX2 alone; exact tools"),
        ("avx2/compare.json", "the same, 1,000 pairs; tools of 8 bits"),
    )
    found = [(words, _speeds(json.loads((_BENCHMARKS / name).read_text()))) for name, words in tables]
    for other in json.loads(Path(__file__).with_name("machines.json").read_text()):
        found.append(
            (other["machine"], [(name, sum(each) / len(each)) for name, each in other["speeds"].items()])
        )
    rows = sum(len(speeds) for _, speeds in found)
    picture = Picture(
        860,
        70 + 22 * rows + 40 * len(found),
        "Pairs a second, by machine",
        "MiniLM-L6, pairs of MS MARCO; medians of rounds in turn. Compare within a machine.",
    )
    line = 76.0
    most = max(speed for _, speeds in found for _, speed in speeds)
    for words, speeds in found:
        picture.text(20, line + 10, words, "bold")
        line += 22
        for name, speed in speeds:
            picture.text(280, line + 12, name, "soft", anchor="end")
            picture.box(
                290, line + 1, 480 * speed / most, 14, "a" if name.startswith("rankmill") else "pad", radius=2
            )
            picture.text(296 + 480 * speed / most, line + 12, f"{speed:.0f}", "soft")
            line += 22
        line += 18
    return str(picture)


def _speeds(table: dict[str, Any]) -> list[tuple[str, float]]:
    """Each contender's pairs a second, the slowest first."""
    pairs = int(table["asked"]["pairs"])
    seconds: dict[str, list[float]] = {}
    for run in table["runs"]:
        if not run["failure"]:
            seconds.setdefault(run["name"], []).append(run["seconds"])
    speeds = [(_NAMES.get(name, name), pairs / median(each)) for name, each in seconds.items()]
    return sorted(speeds, key=lambda each: each[1])


_NAMES = {
    "loop": "transformers, naive loop", "st-fp32": "sentence-transformers, fp32", "st-bf16": "sentence-transformers, bf16",
    "st-int8": "sentence-transformers, ONNX int8", "st-openvino": "sentence-transformers, OpenVINO",
    "st-openvino-fp32": "sentence-transformers, OpenVINO fp32", "st-openvino-int8": "sentence-transformers, OpenVINO int8",
    "st-onnx": "sentence-transformers, ONNX", "infinity": "infinity, fp32", "infinity-bf16": "infinity, bf16",
    "fastembed": "fastembed, ONNX int8",
    "engine": "rankmill, Engine.score", "engine-int8": "rankmill, Engine.score int8",
    "score-file": "rankmill, score-file", "score-file-int8": "rankmill, score-file int8",
}  # fmt: skip
