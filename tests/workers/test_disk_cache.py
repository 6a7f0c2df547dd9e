"""What is derived from models and kept: it is loaded as it was made, or made again."""

from __future__ import annotations

import logging
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankmill.jobs.cache import file_digest
from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host import disk_cache
from rankmill.workers.models import loading
from rankmill.workers.models.description import describe
from rankmill.workers.models.loading import load_model
from tests.conftest import Server, run_command, score_file
from tests.harness.models.tiny import make_bert
from tests.workers.engine.test_engine import one_at_a_time

pytestmark = pytest.mark.own_precision

TEXTS = ["how far", "what moon"], ["a big cat", "tea"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_bert(tmp_path_factory.mktemp("model"), seed=seed) for seed in range(2)]


def scores(model: Path, cache: Path, backend: str) -> list[float]:
    spec = ScoreSpec(model=str(model), precision="fp32", activation="identity")
    found: list[float] = (
        Engine(load_model(spec, "cpu", backend, str(cache)), 4096).score(*TEXTS).scores.tolist()
    )
    return found


def test_a_module_has_the_version_of_the_package_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As onnxruntime, which also comes in onnxruntime-gpu."""
    info = tmp_path / "some_module_gpu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: some-module-gpu\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("some_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert disk_cache.version("some_module") == "1.2"


@pytest.mark.parametrize("backend", ["openvino", "onnx"])
def test_a_planted_graph_is_not_loaded(
    models: list[Path], tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number, model in enumerate(models):
        scores(model, tmp_path / str(number), backend)
    (mine,), (other,) = ((tmp_path / number / backend).iterdir() for number in "01")
    expected = pytest.approx(one_at_a_time(models[0], *TEXTS), abs=1e-4)
    for planted in other.iterdir():
        if planted.name != "digests.json":
            shutil.copyfile(planted, mine / planted.name)
    with caplog.at_level(logging.WARNING, "rankmill.workers"):
        assert scores(models[0], tmp_path / "0", backend) == expected
    assert f"{mine} is damaged and will be made again" in caplog.text
    (mine / "more.data").write_text("a")
    assert scores(models[0], tmp_path / "0", backend) == expected
    assert not (mine / "more.data").exists()
    shutil.rmtree(mine)
    shutil.copytree(other, mine)  # whole, under the name of another
    assert scores(models[0], tmp_path / "0", backend) == expected
    for place in (mine, mine.parent):
        place.chmod(0o777)
        with pytest.raises(WorkerError, match=f"{place} can be written by everybody"):
            scores(models[0], tmp_path / "0", backend)
        place.chmod(0o755)


def test_workers_refuse_a_cache_that_everybody_can_write(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    environ = {"RANKMILL_CACHE_DIR": str(cache)}
    worker = ["rq", "worker", "--worker-class", "rankmill.ScoringWorker", "--serializer", "json"]
    done = run_command(*worker, "--url", server.url, environ=environ)
    (line,) = [line for line in done.err.splitlines() if "cannot start" in line]
    assert f"cannot start: cache_dir: {cache} can be written by everybody" in line
    assert "set cache_dir to a folder of this user" in line
    assert (done.code, "Traceback" in done.err) == (78, False)
    (tmp_path / "a.jsonl").write_text('{"query": "q", "passage": "p"}')
    embedded = score_file(tmp_path / "a.jsonl", "--model", models[0], environ=environ)
    assert (embedded.code, f"{cache} can be written by everybody" in embedded.err) == (1, True), embedded.err


def test_files_that_change_while_they_are_loaded_are_not_kept(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = shutil.copytree(models[0], tmp_path / "model"), tmp_path / "cache"

    def changed(*args: Any) -> object:
        shutil.copyfile(models[1] / "model.safetensors", model / "model.safetensors")
        return describe(*args)

    for backend in ("torch", "openvino", "onnx"):
        shutil.copyfile(models[0] / "model.safetensors", model / "model.safetensors")
        with monkeypatch.context() as patch:
            patch.setattr(loading, "describe", changed)
            with pytest.raises(WorkerError, match=f"the files in {model} changed while they were read"):
                scores(model, cache, backend)
        assert not [path for path in cache.rglob("model.*") if path.is_file()]
        np.testing.assert_allclose(scores(model, cache, backend), one_at_a_time(models[1], *TEXTS), atol=1e-4)
        for kind in ("openvino", "onnx"):
            shutil.rmtree(cache / kind, ignore_errors=True)


def test_a_digest_holds_up_no_other(tmp_path: Path) -> None:
    """A thread that reads a large file does not keep others from theirs."""
    small = tmp_path / "small"
    small.write_text("a")
    with (tmp_path / "sparse").open("wb") as large:
        large.truncate(1 << 30)
    reading = threading.Thread(target=file_digest, args=(tmp_path / "sparse",), daemon=True)
    reading.start()
    assert file_digest(small) == file_digest(small)
    assert reading.is_alive()
    reading.join()


def test_two_that_build_the_same_find_one(tmp_path: Path) -> None:
    def build(folder: Path, *, first: bool = True) -> None:
        (folder / "model.bin").write_text("a")
        if first:  # another worker is faster
            disk_cache.build_once(tmp_path / "b" / "c", partial(build, first=False))

    disk_cache.build_once(tmp_path / "b" / "c", build)
    assert disk_cache.is_kept(tmp_path / "b" / "c", tmp_path)
