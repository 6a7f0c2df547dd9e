"""The faults of the runbook's table, planted among real processes: `status` and a metric name each."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.faults.seen import FAULTS, held, measure
from tests.conftest import ENVIRON
from tests.harness.preloaded import PreloadedProcess
from tests.project.test_rooms import ROOT


def start(command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return PreloadedProcess(
            list(command), cwd=log.parent, env={**ENVIRON, **environ}, stdout=out, stderr=out
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_status_and_metric(name: str) -> None:
    assert measure(FAULTS[name], start, longest=600).sentence


def test_the_runbook_has_the_faults_with_their_alerts() -> None:
    text = (ROOT / "docs" / "operations" / "runbook.md").read_text()
    for name, fault in FAULTS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert f"[{fault.alert}](#{fault.alert.lower()})" in row
        assert row.endswith(f"| {held()[fault.alert]} |")
