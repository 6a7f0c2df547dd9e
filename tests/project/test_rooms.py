"""The project as a whole: who may import whom, what the documents say, what is shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from examples import demo
from examples.evaluate import overlap
from rankmill.cli.score import score_file
from rankmill.jobs.contract.job import worker_command
from rankmill.jobs.contract.spec import Precision, ScoreSpec
from rankmill.jobs.runtime.settings import BASE, Device, Settings, extension_settings
from rankmill.workers.backends.auto import backends
from rankmill.workers.backends.base import DEVICES
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from rankmill.workers.models.sources import DEMO_MODEL
from tests.conftest import score_file as run_score_file

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("rankmill", "benchmarks")
MAPS = ("docs/explanation/architecture.md", "CONTRIBUTING.md")
"""Documents that say where in the code something is."""


def test_backends_are_described_in_words_that_settings_have() -> None:
    assert list(backends())[:4] == ["openvino", "torch", "onnx", "mlx"]  # in this order `auto` prefers them
    known = set(get_args(Precision)) - {"auto"}
    for name, kind in backends().items():
        assert kind.name == name
        assert kind.for_tests <= set(kind.precisions)
        assert set(kind.precisions) <= set(DEVICES) == set(get_args(Device)) - {"auto"}
        assert all(set(precisions) <= known for precisions in kind.precisions.values())


def test_a_backend_is_described_without_its_package() -> None:
    packages = {package for kind in backends().values() for package in kind.packages}
    code = f"import sys, rankmill.workers.backends.auto; print({packages!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_exit_codes_are_in_help() -> None:
    shown = CliRunner().invoke(score_file, ["--help"]).output
    assert [code for code in (0, 1, 2, 3, 130) if not re.search(rf"^ +{code}  ", shown, re.M)] == []


def test_the_guide_shows_the_worker_command_that_errors_name() -> None:
    assert worker_command("rankmill") in (ROOT / "docs" / "guides" / "cluster.md").read_text()


@pytest.mark.parametrize("document", MAPS)
def test_modules_and_names_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    paths = re.findall(r"`([\w./-]+(?:\.py|/))`", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists() and "/" in path.rstrip("/")] == []
    for names, path in re.findall(r"`(\w+(?:\.\w+)?)` in\s`([\w/]+\.py)`", text):
        for name in names.split("."):
            defined = rf"^ *(class|def|local function) {name}\b|^{name}(:| =)"
            assert re.search(defined, (ROOT / path).read_text(), re.M), f"{names} in {path}"


WHILE_IT_WAITS = {
    f"{name}.py"
    for name in (
        "jobs/runtime/limits", "producer/client/sync_client",
        "producer/files/stores/own_folder", "producer/files/workspace", "score/session",
    )
}  # fmt: skip
"""What is called while a producer waits: for each chunk on a busy machine, where results come one by one."""


@pytest.mark.slow
def test_a_pair_passes_the_files_of_the_document_and_no_more_than_it_did() -> None:
    """On a busy machine a count also finds what is done now and then: what several counts find is the way.

    Take the bounds down with it.
    """
    way = (ROOT / MAPS[0]).read_text().partition("## A pair's way, by file")[2].partition("\n## ")[0]
    rows = "".join(row for row in way.splitlines() if row.startswith("| "))
    listed = re.findall(r"`rankmill/([\w/]+\.py)`", rows)
    assert len(set(listed)) == len(listed)
    counts: list[tuple[set[str], set[str]]] = []
    for _ in range(4):
        counts.append(pair_way_here())
        files, returns = (set.intersection(*found) for found in zip(*counts, strict=True))
        differences = sorted(files ^ set(listed))
        if len(files) <= 66 and len(returns) <= 79 and len(differences) <= 6:
            return
    raise AssertionError(f"{len(files)} files, {len(returns)} returns, not as the document: {differences}")


def pair_way_here() -> tuple[set[str], set[str]]:
    """The files and the returns that one count finds."""
    words = [sys.executable, "-m", "tests.project.pair_way"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    files, _, returns = re.split(r"^(\d+ files, \d+ returns:)$", done.stdout, flags=re.M)
    back = {line for line in returns.strip().splitlines() if not WHILE_IT_WAITS & {*line.split()}}
    return {*files.split()} - WHILE_IT_WAITS, back


def test_base_yaml_explains_every_setting() -> None:
    lines = BASE.read_text().splitlines()
    for name in {*Settings.model_fields, *extension_settings()}:
        (line,) = [line for line in lines if line.startswith(f"{name}:")]
        assert "#" in line or name == "queue"


def test_every_module_and_public_name_has_a_docstring() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "D100,D101,D103", *PRODUCT],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def examples() -> dict[str, list[tuple[str, int]]]:
    """Query to its passages and how relevant they are."""
    found: dict[str, list[tuple[str, int]]] = {}
    for line in (ROOT / "examples" / "pairs.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["query"], []).append((row["passage"], row["relevant"]))
    return found


def test_the_example_is_large_enough_and_each_query_has_one_best_passage() -> None:
    queries = examples()
    assert len(queries) >= 20
    for passages in queries.values():
        assert len(passages) >= 10
        assert [relevant for _, relevant in passages].count(2) == 1


def test_the_demo_model_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) <= 10_000_000


@pytest.mark.slow
def test_the_demo_model_ranks_the_example_sensibly() -> None:
    engine = Engine(load_model(ScoreSpec(model="demo", precision="fp32"), "cpu"), 4096)
    right = by_words = 0
    for query, passages in examples().items():
        texts = [text for text, _ in passages]
        best = [relevant for _, relevant in passages].index(2)
        scores = engine.score([query] * len(texts), texts).scores.tolist()
        right += best_is_alone_on_top(scores, best)
        by_words += best_is_alone_on_top(overlap(query, texts), best)
    assert right >= 0.8 * len(examples())
    assert right >= by_words + 0.3 * len(examples())


def best_is_alone_on_top(scores: list[float], best: int) -> bool:
    return all(scores[best] > score for place, score in enumerate(scores) if place != best)


def test_the_demo_s_scores_are_shown_with_the_best_passages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "pairs.scored.parquet"
    done = run_score_file(ROOT / "examples" / "pairs.jsonl", "--model", "demo", "-o", output)
    assert done.code == 0, done.err
    demo.show(output)
    shows_the_best_passages(done.out + capsys.readouterr().out)


@pytest.mark.slow
def test_the_demo_shows_the_best_passages() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shows_the_best_passages(done.stdout)


def shows_the_best_passages(shown: str) -> None:
    assert re.search(r"rows scored at .* pairs/s", shown)
    assert len(re.findall(r"^ +-?\d+\.\d\d  \w", shown, re.M)) == 12
