"""The core stands alone, and each extension beside it: their wheels pass tests of what they have."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.harness.wheels import ROOT, build_wheel, new_environment, run, unpack
from tests.project.test_imports import DIRECTION, NEEDS

pytestmark = pytest.mark.slow

CORE = (
    "jobs/test_runs.py", "jobs/test_waiting_lists.py", "jobs/test_wire.py",
    "producer/files/test_formats.py", "producer/files/test_outputs.py", "producer/runs/test_collector.py",
)  # fmt: skip
"""Tests of the core that are quick, and start no command."""

EXTENSIONS = {
    "batches": "batches/test_batches.py -k told_without",
    "gateway": "gateway/test_dialects.py gateway/test_testing.py",
    "grpc": "grpc/test_grpc.py -k every_kind_of_refusal",
    "lab": "lab/test_agreement.py lab/test_tune.py -k budget_is_a_time or spearman or verdict or ranks_are",
    "page": "page/test_page.py -k latency or rates or reports",
    "rankings": "rankings/test_evaluate.py -k pytrec_eval",
    "registry": "registry/test_reading.py -k pushed or numbered or alias or damaged",
    "runners": "runners/test_submitted.py runners/test_webhooks.py -k submitted or signature",
}
"""Tests of each extension that take seconds, and what selects them."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the core."""
    place = tmp_path_factory.mktemp("core")
    return new_environment(place / "venv", build_wheel(place / "wheel", extensions=()))


def run_tests(python: Path, folder: Path, *arguments: str, extensions: Collection[str] = ()) -> None:
    """Run tests in an environment, in a folder that has the tests of only these extensions."""
    for name in (
        "benchmarks",
        "configs",
        "docs/operations",
        "examples",
        "tests",
    ):  # not rankmill: the wheel's is tested
        ignored = shutil.ignore_patterns("__pycache__", *EXTENSIONS.keys() - extensions)
        shutil.copytree(ROOT / name, folder / name, ignore=ignored if name == "tests" else None)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    assert " passed" in run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], folder)


def test_the_core_scores_a_file(python: Path, tmp_path: Path) -> None:
    pairs = ROOT / "examples" / "pairs.jsonl"
    options = ["--model", "demo", "-o", "scored.parquet", "--json"]
    summary = json.loads(run([python.with_name("score-file"), pairs, *options], tmp_path))
    assert (summary["rows"], summary["row_errors"]) == (250, 0)


def test_all_names_of_the_core_are_imported(python: Path, tmp_path: Path) -> None:
    run([python, "-c", "from rankmill import *; Client, CrossEncoder, RunFailed"], tmp_path)


def test_the_core_passes_its_tests(python: Path, tmp_path: Path) -> None:
    run_tests(python, tmp_path, *(f"tests/{name}" for name in CORE))


@pytest.mark.parametrize("extension", DIRECTION["rankmill.extensions"])
def test_an_extension_passes_its_tests_without_the_others(extension: str, tmp_path: Path) -> None:
    own = {extension, *NEEDS.get(extension, ())}
    wheel = build_wheel(tmp_path / "wheel", own)
    packed = re.findall(r"^rankmill/extensions/(\w+)/__init__", "\n".join(ZipFile(wheel).namelist()), re.M)
    assert set(packed) == own
    python = unpack(wheel, tmp_path / "venv")
    files, _, chosen = EXTENSIONS[extension].partition(" -k ")
    selected = ["-k", chosen] if chosen else []
    tests = (f"tests/extensions/{file}" for file in files.split())
    run_tests(python, tmp_path, *tests, *selected, extensions=own)
