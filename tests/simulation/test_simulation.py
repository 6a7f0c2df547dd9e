"""Simulated clusters come to their end, with the score or the error of each row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.found import FOUND
from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def simulate(*options: str, module: str = "tests.simulation") -> tuple[int, str]:
    """Run the simulation in a process of its own, as it replaces clocks and threads."""
    command = [sys.executable, "-m", module, *options]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_seeds() -> None:
    """They break no promise, and load each one.

    Shows: the server loses its last writes, or a failover does.
    Shows: the server loses acknowledged writes.
    Shows: a producer ends while the server takes no writes.
    Shows: a file is started over with `--restart`.
    """
    code, said = simulate("--seeds", "25", "--processes", "2")
    assert code == 0, said
    assert "less than one scenario of twenty" not in said


def test_it_needs_neither_a_model_runtime_nor_a_web_framework() -> None:
    """CI runs it with a second Python, which has neither."""
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'starlette', 'grpc']))"
    subprocess.run([sys.executable, "-c", f"{block}; import tests.simulation.__main__"], cwd=ROOT, check=True)


def test_failures_that_were_found_are_mended() -> None:
    """Shows: a device computes wrong scores.
    Shows: a runner is killed.
    Shows: the server is away for a while.
    Shows: hosts' clocks differ or jump.
    """
    code, said = simulate("--found")
    assert code == 0, said
    assert said.startswith(f"{len(FOUND)} seeds, 0 failed")


def test_a_kept_failure_whose_fault_comes_too_late_is_told() -> None:
    late = "_kept('', '', _run(1, 1.0, 'live'), Fault(100.0, 'kill')).scenario"
    names = "from tests.simulation import __main__; from tests.simulation.found import Fault, _kept, _run"
    script = f"{names}; __main__.FOUND = ({late},); __main__.main()"
    command = [sys.executable, "-c", script, "--found"]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 faults found nothing to strike: seed 1, 100.00 s: kill (0.00, 0), too late" in done.stdout


def test_a_seed_is_the_same_each_time() -> None:
    first, second = (simulate("--first", "7", "--seeds", "1")[1].rpartition("; ")[2] for _ in "ab")
    assert first == second
    assert "commands" in first


def test_each_break_has_its_place() -> None:
    places = {each.name: (ROOT / "rankmill" / each.file).read_text().count(each.right) for each in MUTANTS}
    assert not {name: count for name, count in places.items() if count != 1}
    for file, _, test in (each.test.partition("::") for each in MUTANTS if each.test):
        assert f"def {test}(" in (ROOT / file).read_text()


@pytest.mark.slow
def test_breaks_are_found() -> None:
    some = "a failed attempt"  # all of them take minutes
    breaks = sum(some in each.name for each in MUTANTS)
    code, said = simulate("--only", some, module="tests.simulation.mutants")
    assert code == 0, said
    assert f"{breaks} of {breaks} found" in said
