"""The side-by-side's arithmetic: quality, table, goals. No peer is installed or run here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ages
from benchmarks.compare import commit, read_qrels
from benchmarks.comparison.contenders import CONTENDERS
from benchmarks.comparison.environments import ROOT, dependencies
from benchmarks.comparison.report import bar_chart
from benchmarks.comparison.standings import from_json, goals, speed_table, standings
from benchmarks.engine.ceiling import linear_layers
from benchmarks.figures import FOLDER, told
from rankmill.extensions.lab.agreement import ndcg
from rankmill.extensions.lab.machine import markdown_table
from tests.harness.tools import tool

SCORE_FILE = ((1, 2.0), (2, 2.5), (3, 2.0))
"""Rounds and seconds; the ratios to sentence-transformers are 5.00, 8.00 and 6.25."""

RESULTS = from_json(
    {
        "asked": {"pairs": "1000"},
        "machine": {"CPU": "a CPU"},
        "ceilings": [
            {
                "tokens": 92.0,
                "gflop": 2.0,
                "tflops": {"bf16": 2.0, "int8": 8.0},
                "pairs_per_second": {"bf16": 1000.0, "int8": 4000.0},
            }
        ],
        "runs": [
            *(
                {"name": "st-fp32", "round": r, "seconds": s, "precision": "fp32"}
                for r, s in ((1, 10.0), (2, 20.0), (3, 12.5))
            ),
            {"name": "st-bf16", "round": 1, "seconds": 2.5, "precision": "bf16"},
            {"name": "st-int8", "round": 1, "seconds": 2.0, "precision": "int8"},
            {"name": "st-openvino", "round": 1, "seconds": 4.0, "load_seconds": 3.0, "precision": "bf16"},
            {"name": "infinity", "round": 1, "failure": "cannot be installed: no such version"},
            {"name": "engine", "round": 1, "seconds": 1.6, "precision": "bf16"},
            {"name": "engine-int8", "round": 1, "seconds": 0.8, "precision": "int8-64-bf16"},
            *({"name": "score-file", "round": r, "seconds": s, "precision": "bf16"} for r, s in SCORE_FILE),
            {"name": "score-file-int8", "round": 1, "seconds": 1.0, "precision": "int8-128"},
        ],
        "quality": {
            "st-fp32": {"spearman": 1.0, "ndcg": 0.65},
            "st-bf16": {"spearman": 0.998},
            "st-int8": {"spearman": 0.991},
            "st-openvino": {"spearman": 0.999},
            "score-file": {"spearman": 0.9997, "ndcg": 0.6512},
            "engine-int8": {"spearman": 0.9985},
            "score-file-int8": {"spearman": 0.9985},
        },
    }
)  # fmt: skip


def test_ndcg_is_the_one_of_trec_eval(tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("1 0 a 3\n1 0 b 0\n1 0 found-by-nobody 1\n2 0 a 0\n")
    qrels = read_qrels(tmp_path / "qrels")
    queries, documents = ["1", "1", "1", "unjudged"], ["a", "b", "never judged", "a"]
    second = 3 / math.log2(3) / (3 + 1 / math.log2(3))
    scores = np.array([0.5, 0.9, 0.1, 1.0], np.float32)
    assert ndcg(queries, documents, scores, qrels) == pytest.approx(second)
    assert ndcg(queries, documents, scores, qrels, k=1) == 0
    assert ndcg(queries, documents, scores, {}) is None
    tied = np.zeros(4, np.float32)  # the larger id comes first: "never judged", "b", "a"
    assert ndcg(queries, documents, tied, qrels) == pytest.approx(3 / 2 / (3 + 1 / math.log2(3)))
    assert ndcg([*queries, "2"], [*documents, "a"], np.append(scores, 1), qrels) == pytest.approx(second / 2)


def test_table_has_medians_and_ratios() -> None:
    rows = {line.split("|")[1].strip(): line for line in speed_table(RESULTS).splitlines()}
    cells = [cell.strip() for cell in rows["**rankmill, score-file**"].split("|")]
    # The fastest exact peer is OpenVINO: torch in bf16 is not exact here, and int8 is another class.
    assert cells[2:10] == ["exact", "bf16", "500", "400-500", "6.25", "2.00", "50%", "0.0"]
    cells = [cell.strip() for cell in rows["**rankmill, score-file int8**"].split("|")]
    assert cells[2:10] == ["8-bit", "int8", "1,000", "1,000-1,000", "10.00", "2.00", "25%", "0.0"]
    cells = [cell.strip() for cell in rows["sentence-transformers, torch bf16"].split("|")]
    assert (cells[2], cells[7]) == ("-", "-")
    assert " 50-100 |" in rows["sentence-transformers, torch fp32"]
    assert "infinity, torch" not in rows


def test_what_a_contender_exceeds_is_not_its_ceiling() -> None:
    low = replace(RESULTS.ceilings[0], pairs_per_second={"bf16": 1000.0, "int8": 2.0})
    rows = speed_table(replace(RESULTS, ceilings=[low])).splitlines()
    shares = {cells[1].strip(): cells[8].strip() for row in rows[2:] if (cells := row.split("|"))}
    assert shares["**rankmill, score-file**"] == "50%"
    assert shares["**rankmill, score-file int8**"] == "-"


def test_goals_are_met_or_not() -> None:
    exact, engine, eight_bit, share = goals(RESULTS)
    assert "score-file (bf16), which ranks better, times the fastest exact peer (" in exact
    assert "(sentence-transformers, OpenVINO): 2.00, goal 1.70: **met**" in exact
    assert "8-bit peer (sentence-transformers, ONNX int8): 2.50, goal 1.30: **met**" in engine
    assert "8-bit peer (sentence-transformers, ONNX int8): 2.00, goal 1.30: **met**" in eight_bit
    assert "0.80, goal 0.95: **not met**" in share


def test_int8_has_to_rank_at_least_as_well_as_the_peer_and_may_be_exact() -> None:
    worse = replace(RESULTS, quality=RESULTS.quality | {"engine-int8": {"spearman": 0.98}})
    assert (
        "Engine.score int8: ranks worse than sentence-transformers, ONNX int8: **not met**" in goals(worse)[1]
    )
    runs = [replace(each, precision="bf16") if each.name == "engine-int8" else each for each in RESULTS.runs]
    exact = replace(RESULTS, runs=runs, quality=RESULTS.quality | {"engine-int8": {"spearman": 0.9998}})
    assert (
        "Engine.score int8 (bf16), which ranks better, times the fastest 8-bit peer" in goals(exact)[1]
    )  # int8 is not worth it
    assert "2.50, goal 1.30: **met**" in goals(exact)[1]
    alone = replace(RESULTS, runs=[each for each in RESULTS.runs if not each.name.startswith("score-file")])
    assert len(goals(alone)) == 1


def test_a_difference_within_the_interval_is_none() -> None:
    quality = RESULTS.quality | {"st-int8": {"spearman": 0.99954}}
    ours = {"spearman": 0.99953, "low": 0.99940, "high": 0.99961}
    alike = replace(RESULTS, quality=quality | {"engine-int8": ours})
    assert "Engine.score int8 (int8), which ranks as well, times" in goals(alike)[1]
    worse = replace(RESULTS, quality=quality | {"engine-int8": ours | {"high": 0.99953}})
    assert "Engine.score int8: ranks worse than sentence-transformers, ONNX int8" in goals(worse)[1]
    better = replace(
        RESULTS, quality=quality | {"engine-int8": {"spearman": 0.9997, "low": 0.9996, "high": 0.9998}}
    )
    assert "which ranks better, times" in goals(better)[1]


def test_report_tells_quality_and_failures() -> None:
    text = standings(RESULTS)
    assert "infinity, torch: did not run: cannot be installed: no such version" in text
    assert "0.99970" in text
    assert "+0.0012" in text
    assert "bf16 2.00 TFLOP/s, **1,000 pairs/s**, int8 8.00 TFLOP/s" in text


def test_what_does_not_rank_as_fp32_does_is_not_exact() -> None:
    results = replace(RESULTS, quality=RESULTS.quality | {"score-file": {"spearman": 0.9989}})
    assert "score-file: not exact on these pairs: **not met**" in goals(results)[0]


def test_chart_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    bars = [("a peer", 100.0, False), ("rankmill", 300.0, True)]
    for name in ("first.svg", "second.svg"):
        bar_chart(tmp_path / name, bars, unit="pairs/s", marks={"limit": 900, "another": 500})
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    assert "rankmill" in (tmp_path / "first.svg").read_text()


def test_markdown_table_aligns_numbers_to_the_right() -> None:
    assert markdown_table(["", "n"], [["a", "1"], ["b", "20"]]).splitlines() == [
        "|   |  n |",
        "| - | -: |",
        "| a |  1 |",
        "| b | 20 |",
    ]


def test_ceiling_counts_the_layers_that_every_token_passes(tiny_model: Path) -> None:
    assert linear_layers(tiny_model) == {(32, 32): 8, (32, 128): 2, (128, 32): 2}


def test_every_contender_has_its_script_and_peers_pin_torch() -> None:
    assert len({contender.name for contender in CONTENDERS}) == len(CONTENDERS)
    for contender in CONTENDERS:
        wanted = dependencies(ROOT / "benchmarks" / "peers" / contender.script)
        assert ("torch==2.13.0" in wanted) != contender.ours


def test_the_first_screen_says_what_its_table_says() -> None:
    """`make figures` writes both; figures of before it have no date."""
    results = from_json(json.loads((FOLDER / "compare.json").read_text()))
    if results.date:
        assert {path: text for path, text in told(results).items() if path.read_text() != text} == {}


def test_results_are_put_into_readme_and_benchmarks() -> None:
    asked = {"pairs": "4000", "model": "minilm", "rankmill": "0.1.0 (abc1234)"}
    of = {"CPU": "AMD EPYC", "cores": "1 (2 threads)", "instruction sets": "avx2, avx512_bf16"}
    readme, explained = told(replace(RESULTS, asked=asked, machine=of, date="2026-11-29")).values()
    assert "[6.2 times as fast](#how-fast-it-is)" in readme
    assert "2 threads of an AMD EPYC with avx512_bf16, minilm, 4,000 pairs" in readme
    assert "2026-11-29, commit abc1234). score-file in bf16 is 6.2 times as fast as" in readme
    assert "| AMD EPYC, bf16 | abc1234, 2026-11-29 |" in explained
    assert "2.00 (sentence-transformers, OpenVINO)" in explained


def test_figures_are_measured_once_for_a_commit(tmp_path: Path) -> None:
    """The same command has nothing left to measure then; the page names commit, machine and date."""
    options = ["--model", "demo", "--pairs", "none", "--out", str(tmp_path), "--share", "0.002"]
    command = [sys.executable, "-m", "benchmarks.figures", "memory", *options]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert first.stderr.count("memory: ") == 2
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr == ""
    text = (tmp_path / "figures.md").read_text()
    assert "## Memory" in text
    assert f"Commit {commit()}, 20" in text
    assert "| 1,000,000 rows |" in text
    assert (tmp_path / "memory.svg").exists()


def test_a_table_is_too_old_by_the_commits_of_its_code(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "docs" / "benchmarks").mkdir(parents=True)
    (here / "docs" / "explanation").mkdir()
    (here / ages.CODE[0]).mkdir(parents=True)
    (here / "README.md").write_text("([table](docs/benchmarks/compare.md))\n")
    (here / "docs/explanation/benchmarks.md").write_text(
        "# B\n\n## New\n\n## Old\n\n[x](../benchmarks/amx/compare.md)\n"
    )
    git = partial(run_git, here)
    git("init", "--quiet")
    code = here / ages.CODE[0] / "code.py"

    def change(number: int, words: str = "") -> None:
        code.write_text(f"{words}\n{number}\n")
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "x")

    change(0)
    table = here / "docs/benchmarks/compare.json"
    table.write_text(json.dumps({"asked": {"rankmill": f"0.1.0 ({git('rev-parse', '--short', 'HEAD')})"}}))
    for number in range(1, ages.LIMIT + 1):
        change(number)
    change(ages.LIMIT, '"""A docstring."""  # and a comment')
    assert ages.too_old(here) == []
    change(ages.LIMIT + 1)
    (line,) = ages.too_old(here)
    assert line.startswith(f"docs/benchmarks/compare.json is of {ages.LIMIT + 1} commits ago in rankmill/")
    run_git(tmp_path, "clone", "--quiet", "--depth", "1", here.as_uri(), "shallow")
    assert ages.too_old(tmp_path / "shallow") == []
    table.write_text(json.dumps({"asked": {"rankmill": "0.1.0 (0123456)"}}))
    assert "a commit that is not in this history" in ages.too_old(here)[0]


def run_git(folder: Path, *arguments: str) -> str:
    git = tool("git", "git")
    return subprocess.run(
        [git, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()
