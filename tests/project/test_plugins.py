"""The packages in examples/plugins: each is a recipe of CONTRIBUTING, and is used beside rankmill's wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.harness.wheels import ROOT, build_wheel, new_environment

PLUGINS = sorted((ROOT / "examples" / "plugins").iterdir())
NAMES = [folder.name for folder in PLUGINS]


@pytest.mark.parametrize("folder", PLUGINS, ids=NAMES)
def test_a_recipe_is_that_of_its_example(folder: Path) -> None:
    _, recipe = (folder / "README.md").read_text().split("\n\n", 1)
    contributing = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f".** {' '.join(recipe.split())} **… a" in contributing


@pytest.mark.parametrize("folder", PLUGINS, ids=NAMES)
def test_an_example_has_fewer_than_sixty_lines(folder: Path) -> None:
    (module,) = folder.glob("*.py")
    assert sum(bool(line.strip()) for line in module.read_text().splitlines()) < 60


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with the wheel and all plugins."""
    place = tmp_path_factory.mktemp("plugins")
    copies = [shutil.copytree(folder, place / folder.name) for folder in PLUGINS]
    return new_environment(place / "venv", build_wheel(place / "wheel"), *copies).parent


@pytest.fixture
def overlap_model(tmp_path: Path) -> Path:
    """A model of the plugin's backend that gives the share of shared words twice."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(ROOT / "examples" / "demo-model" / name, model)
    (model / "config.json").write_text(json.dumps({"model_type": "overlap", "num_labels": 1}))
    save_file({"scale": np.full(1, 2, np.float32)}, model / "model.safetensors", {"format": "pt"})
    return model


def run(command: Sequence[object], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    words = list(map(str, command))
    return subprocess.run(
        words, cwd=folder, env=os.environ | environ, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.usefixtures("overlap_model")
def test_a_backend_a_format_and_a_name_of_others_are_found(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.usv").write_text("query\x1fpassage\x1ea b\x1fa c\x1ea b\x1fx y\x1e")
    options = ["-o", "scored.usv", "--model", "shelf:model", "--backend", "overlap", "--json"]
    command = [environment / "score-file", "pairs.usv", *options]
    done = run(command, tmp_path, RANKMILL_SHELF=str(tmp_path))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["backend"], summary["model"]) == ("overlap", "shelf:model")
    _, *rows = (tmp_path / "scored.usv").read_text().split("\x1e")[:-1]
    found = [float(row.split("\x1f")[2]) for row in rows]
    shared = np.array([2 / 4, 1 / 4])  # the query's tokens are a, b and two that each text has
    assert found == pytest.approx(1 / (1 + np.exp(-2 * shared)), abs=1e-4)


DIALECT = """
from rankmill.extensions.gateway.dialects.base import read_as
from rankmill.extensions.gateway.dialects.routes import dialect_at, score_paths
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.score_request import RequestScores
(path,) = [each for each in score_paths() if each.path == "/scores"]
sent = {"query": "q", "texts": ["p", "r"]}
body = read_as(path.body(sent), sent)
print(path.score_request(body, sent).passages, body.answer(RequestScores([0.25, 0.75], "m")))
print(dialect_at("/plain/scores").error(Refusal("busy", "later"), 429))
"""


@pytest.mark.slow
def test_a_dialect_of_others_is_found(environment: Path, tmp_path: Path) -> None:
    done = run([environment / "python", "-c", DIALECT], tmp_path)
    assert done.stderr == ""
    assert done.stdout == "['p', 'r'] [0.25, 0.75]\n{'status': 429, 'reason': 'later'}\n"
