"""OpenVINO: graphs are kept, whatever happens to them, and the package is silent."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.registry import BACKENDS
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.conftest import ENVIRON, run_command
from tests.harness.models.tiny import make_bert
from tests.workers.engine.test_engine import one_at_a_time

pytest.importorskip("openvino")

PAIR = ["how far"], ["a cat and the moon"]


def check(model: Path, cache: Path, precision: str = "fp32") -> None:
    """It loads and scores as plain transformers does."""
    spec = ScoreSpec.model_validate({"model": str(model), "precision": precision, "activation": "identity"})
    loaded = load_model(spec, "cpu", "openvino", str(cache))
    assert loaded.backend.name == "openvino"
    difference = Engine(loaded, 64).score(*PAIR).scores - one_at_a_time(model, *PAIR)
    assert np.abs(difference).max() < (1e-5 if precision == "fp32" else 0.1)


def graphs(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.glob("openvino/**/model.*")}


@pytest.mark.slow
def test_a_model_is_converted_once_for_each_content_and_kind(tmp_path: Path) -> None:
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"
    check(model, cache)
    first = graphs(cache)
    assert sorted(path.name for path in first) == ["model.bin", "model.xml"]
    check(model, cache)
    if BACKENDS["openvino"].lacks("cpu", "bf16") is None:
        check(model, cache, "bf16")  # of the same weights
    assert graphs(cache) == first
    check(model, cache, "int8-128")
    assert len(graphs(cache)) == 4
    make_bert(model, seed=1)
    check(model, cache)
    assert len(graphs(cache)) == 6
    assert first.items() <= graphs(cache).items()
    assert not list(cache.glob("openvino/.making-*"))


@pytest.mark.parametrize("name", ["model.xml", pytest.param("model.bin", marks=pytest.mark.slow)])
def test_a_damaged_graph_is_made_again(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"
    check(model, cache)
    (damaged,) = cache.rglob(name)
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "rankmill.workers"):
        check(model, cache)
        assert "is damaged and will be made again" in caplog.text
        caplog.clear()
        check(model, cache)
        assert not caplog.text


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"
    cache.write_text("not a folder")
    with caplog.at_level(logging.WARNING, "rankmill.workers"):
        check(model, cache)
    assert "cannot keep the OpenVINO graph" in caplog.text


def watched_loads(model: Path, cache: Path, *precisions: str) -> str:
    """A script that loads the model, and prints whether it has forked or opened a connection."""
    return f"""
import sys
seen = []
sys.addaudithook(lambda event, args: event in {{"os.fork", "socket.connect"}} and seen.append((event, args)))
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.loading import load_model
for precision in {precisions!r}:
    load_model(ScoreSpec(model={str(model)!r}, precision=precision), "cpu", "openvino", {str(cache)!r})
    print(precision, "nncf" in sys.modules, seen)
"""


def test_converting_tells_nobody_and_forks_nothing(tmp_path: Path) -> None:
    code = watched_loads(make_bert(tmp_path / "model"), tmp_path, "fp32")
    home = tmp_path / "home"
    home.mkdir()
    done = run_command("python", "-c", code, environ={"HOME": str(home)})
    assert done.out.splitlines() == ["fp32 False []"], done.err
    assert not list(home.glob("intel"))


@pytest.mark.slow
def test_nobody_is_told_and_nothing_is_forked(tmp_path: Path) -> None:
    """OpenVINO and NNCF would report their use to Google Analytics, from a process that they fork."""
    code = watched_loads(make_bert(tmp_path / "model"), tmp_path, "fp32", "int8-128")
    home = tmp_path / "home"
    home.mkdir()
    environ = {**ENVIRON, "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["fp32 False []", "int8-128 True []"]
    assert not list(home.glob("intel"))


@pytest.mark.slow
def test_a_signal_after_models_have_come_and_gone_ends_nobody(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.loading import load_model
spec = ScoreSpec(model=sys.argv[1], precision="fp32")
first, second = (load_model(spec, "cpu", "openvino", sys.argv[2]) for _ in range(2))
del first
del second
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGTERM)
"""
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"
    check(model, cache)
    command = [sys.executable, "-c", code, str(model), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
