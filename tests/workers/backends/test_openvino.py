"""OpenVINO: graphs are kept, whatever happens to them, and the package is silent."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.auto import backends
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.conftest import ENVIRON, run_command
from tests.harness.models.tiny import make_bert
from tests.workers.engine.test_engine import one_at_a_time

pytest.importorskip("openvino")

from openvino import opset15 as ops

from rankmill.workers.backends.openvino.backend import compile_graph, openvino
from rankmill.workers.backends.openvino.weights import shrink

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
    if backends()["openvino"].lacks("cpu", "bf16") is None:
        check(model, cache, "bf16")  # of the same weights
    assert graphs(cache) == first
    check(model, cache, "int8-128")
    assert len(graphs(cache)) == 4
    check(model, cache, "int8-64")  # in other groups
    assert len(graphs(cache)) == 6
    make_bert(model, seed=1)
    check(model, cache)
    assert len(graphs(cache)) == 8
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
        assert not [each for each in caplog.records if each.name.startswith("rankmill.workers")]


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
    print(precision, seen)
"""


def test_converting_tells_nobody_and_forks_nothing(tmp_path: Path) -> None:
    """OpenVINO would report its use to Google Analytics, from a process that it forks."""
    code = watched_loads(make_bert(tmp_path / "model"), tmp_path, "fp32", "int8-128")
    home = tmp_path / "home"
    home.mkdir()
    done = run_command("python", "-c", code, environ={"HOME": str(home)})
    assert done.out.splitlines() == ["fp32 []", "int8-128 []"], done.err
    assert not list(home.glob("intel"))


@pytest.mark.parametrize(("width", "group"), [(128, 64), (128, 128), (192, 64), (200, 64)], ids=str)
def test_a_large_weight_coarsens_those_of_its_group_alone(width: int, group: int) -> None:
    """With one scale for a whole row, all weights of a row with a large one would lose bits."""
    weights = np.random.default_rng(0).standard_normal((6, width)).astype(np.float32)
    weights[0, 3], weights[1] = 100, 0
    left = ops.parameter([-1, width], np.float32)
    graph = openvino.Model([ops.matmul(left, ops.constant(weights), False, True)], [left], "product")
    shrink(graph, group)
    seen = compile_graph(graph, "fp32")([np.eye(width, dtype=np.float32)])[0].T
    error = np.abs(seen - weights)
    alone = slice(group if width % group == 0 else width, None)  # else the row is the group
    assert 0.01 < error[0].max() <= 100 / 127 / 2 + 1e-4
    assert error[0, alone].max(initial=0) < 0.02
    assert error[1].max() == 0
    assert 0.001 < error[2:].max() < 0.02


def test_layers_and_embeddings_have_8_bits_and_all_else_has_not(tmp_path: Path) -> None:
    model, cache = make_bert(tmp_path / "model", hidden=64), tmp_path / "cache"
    spec = ScoreSpec.model_validate({"model": str(model), "precision": "int8-64"})
    small = load_model(spec, "cpu", "openvino", str(cache)).backend.bytes
    exact = load_model(spec.model_copy(update={"precision": "fp32"}), "cpu", "openvino", str(cache))
    assert 3 < exact.backend.bytes / small < 4


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


_AT_ONCE = """
import sys, threading
import numpy as np
from rankmill.workers.backends.openvino.backend import core, openvino
from openvino import opset15 as ops
given = ops.parameter(openvino.PartialShape([-1, -1]), openvino.Type.f32)
compiled = core().compile_model(openvino.Model([ops.relu(given)], [given]), "CPU")
requests = [compiled.create_infer_request() for _ in range(8)]
sys.setswitchinterval(1e-6)
begin = threading.Barrier(len(requests))
def score(request):
    begin.wait()
    request.start_async([np.ones((3, 5), np.float32)])
    request.wait()
threads = [threading.Thread(target=score, args=[each], daemon=True) for each in requests]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


def test_first_forwards_in_several_threads_do_not_deadlock() -> None:
    """As in a worker that warms a model while it scores; OpenVINO alone lets both wait for ever."""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", _AT_ONCE], env=ENVIRON, check=True, timeout=60)
