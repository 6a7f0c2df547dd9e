"""The core stands alone: its wheel without extensions scores a file, and passes tests of the core."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.wheels import ROOT, build_wheel, new_environment
from tests.project.test_imports import MODULES, imports

_CORE = ("rankmill.jobs.", "rankmill.workers.", "rankmill.producer.", "rankmill.score.", "rankmill.cli.")
_ARROWS = [
    there
    for module, path in MODULES.items()
    if module.startswith(_CORE)
    for there in imports(path)
    if there.startswith("rankmill.extensions.")
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_ARROWS), reason="the core imports extensions"),
]

TESTS = (
    "jobs/test_runs.py", "jobs/test_waiting_lists.py", "jobs/test_wire.py",
    "producer/files/test_formats.py", "producer/files/test_outputs.py", "producer/runs/test_collector.py",
)  # fmt: skip
"""Tests of the core that are quick, and start no command."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the core."""
    place = tmp_path_factory.mktemp("core")
    return new_environment(place / "venv", build_wheel(place / "wheel", core=True))


def run(command: Sequence[object], folder: Path) -> str:
    """Run a command in a folder, and return its output; pytest's own variables are not for it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_core_scores_a_file(python: Path, tmp_path: Path) -> None:
    pairs = ROOT / "examples" / "pairs.jsonl"
    options = ["--model", "demo", "-o", "scored.parquet", "--json"]
    summary = json.loads(run([python.with_name("score-file"), pairs, *options], tmp_path))
    assert (summary["rows"], summary["row_errors"]) == (250, 0)


def test_the_core_passes_its_tests(python: Path, tmp_path: Path) -> None:
    for name in ("benchmarks", "configs", "examples", "tests"):  # not rankmill: the wheel's is tested
        ignored = shutil.ignore_patterns("extensions", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    tests = [f"tests/{name}" for name in TESTS]
    said = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], tmp_path)
    assert " passed" in said
