"""ONNX Runtime: exported once, kept, and scored as plain transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from rankmill import Client
from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends import auto
from rankmill.workers.backends.auto import backends, choose_backend
from rankmill.workers.backends.base import LayerShape, ModelFiles
from rankmill.workers.backends.speed import Speeds
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host import device
from rankmill.workers.models.loading import load_model
from tests.conftest import Server, StartWorker
from tests.harness.models.tiny import make_bert
from tests.workers.backends.test_backends import CACHE, EXAMPLES, plain_logits, some_batch
from tests.workers.backends.test_first_token import FAMILIES, small_model
from tests.workers.engine.test_engine import one_at_a_time

pytest.importorskip("onnxruntime")
import onnx

from rankmill.workers.backends.onnx.backend import OnnxBackend, session, timed_layer
from rankmill.workers.backends.onnx.files import onnx_file

pytestmark = pytest.mark.own_precision

SHAPES = [(5, 20), (1, 2), (3, 61), (17, 33), (2, 16)]


def file_of(folder: Path, family: str, precision: str) -> tuple[Any, Path]:
    plain = small_model(family, FAMILIES[family])
    plain.save_pretrained(folder / "model")
    return plain, onnx_file(ModelFiles(folder / "model", None, plain.config, folder / "cache"), precision)


def worst_difference(plain: Any, file: Path, precision: str) -> float:
    backend = OnnxBackend(file, precision, 1)
    types = getattr(plain.config, "type_vocab_size", 0)
    batches = [some_batch(*shape, types) for shape in SHAPES]
    return max(
        float(np.abs(backend.submit(batch).result() - plain_logits(plain, batch)).max()) for batch in batches
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scores_as_in_transformers(family: str, tmp_path: Path) -> None:
    assert worst_difference(*file_of(tmp_path, family, "fp32"), "fp32") < 1e-4


@pytest.mark.slow
def test_int8_ranks_the_example_as_fp32_does() -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()][:120]
    texts = [row["query"] for row in rows], [row["passage"] for row in rows]
    ranks = []
    for precision in ("fp32", backends()["onnx"].int8()[0], "int8-dynamic-7bit"):
        spec = ScoreSpec.model_validate({"model": "demo", "precision": precision, "activation": "identity"})
        model = load_model(spec, "cpu", "onnx")
        assert (model.backend.name, model.backend.precision) == ("onnx", precision)
        ranks.append(Engine(model, 4096).score(*texts).scores.argsort().argsort())
    assert np.min(np.corrcoef(ranks)) > 0.995


def test_cpus_that_compute_int8_differently_have_two_names_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no output mixes them: a run's first worker settles the name, and others compute that, or refuse."""
    model, config = make_bert(tmp_path / "model"), AutoConfig.for_model("bert")

    def here(precision: str) -> str:
        spec = ScoreSpec.model_validate({"model": str(model), "precision": precision})
        return load_model(spec, "cpu", "onnx", str(tmp_path / "cache")).backend.precision

    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx2", "avx512_vnni"}))
    assert here("int8") == "int8-dynamic"
    assert here("int8-dynamic-7bit") == "int8-dynamic-7bit"  # as a worker without VNNI has settled
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert here("int8") == "int8-dynamic-7bit"
    with pytest.raises(WorkerError, match="int8-dynamic overflows on this CPU, which has no VNNI"):
        choose_backend("onnx", "int8-dynamic", config, "cpu", CACHE)


def test_a_model_is_exported_once_for_each_content_and_precision(tmp_path: Path) -> None:
    model, cache = make_bert(tmp_path / "model"), tmp_path / "cache"

    def load(precision: str = "fp32") -> None:
        spec = ScoreSpec.model_validate({"model": str(model), "precision": precision})
        load_model(spec, "cpu", "onnx", str(cache))

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (cache / "onnx").rglob("*.onnx")}

    load()
    first = files()
    assert len(first) == 1
    load()
    assert files() == first
    load("int8")
    assert len(files()) == 2
    make_bert(model, seed=1)
    load()
    assert len(files()) == 3
    assert first.items() <= files().items()
    assert not list(cache.glob("onnx/.making-*"))


def test_what_it_does_not_run_is_said(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert")
    with pytest.raises(SpecError, match="bf16 is not supported on cpu by backend onnx; use fp32, int8, "):
        choose_backend("onnx", "bf16", config, "cpu", CACHE)
    with pytest.raises(SpecError, match="onnx cannot be used: it runs on CPUs, not on cuda"):
        choose_backend("onnx", "fp16", config, "cuda", CACHE)
    file = tmp_path / "a-file"
    file.write_text("")
    with pytest.raises(SpecError, match="its ONNX file cannot be kept in"):
        load_model(ScoreSpec(model=str(make_bert(tmp_path)), precision="fp32"), "cpu", "onnx", str(file))


def test_a_model_whose_file_cannot_be_kept_is_scored_by_another_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "onnx").write_text("")
    spec = ScoreSpec(model=str(make_bert(tmp_path / "model")), precision="fp32")
    with pytest.raises(SpecError, match=r"backend onnx cannot run the model .*its ONNX file cannot be kept"):
        load_proven(spec, "cpu", "onnx", str(tmp_path / "cache"))
    speeds = Speeds({("onnx", "fp32"): 9.0, ("torch", "fp32"): 1.0})
    monkeypatch.setattr(auto, "cpu_speeds", lambda *_: speeds)
    assert load_proven(spec, "cpu", "auto", str(tmp_path / "cache")).backend.name == "torch"


def test_workers_that_start_together_share_one_file(
    server: Server, workers: StartWorker, tmp_path: Path, tiny_model: Path
) -> None:
    environ = {"RANKMILL_BACKEND": "onnx", "RANKMILL_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("a", "b"):
        workers(ready=name == "b", environ=environ, name=name)
    queries, passages = ["how far"] * 40, ["a cat " * n for n in range(40)]
    client = Client(server.url, model=str(tiny_model), precision="fp32", activation="identity", chunk_size=4)
    run = client.submit(zip(queries, passages, strict=True))
    parts = list(run.tables())
    assert {part.stats.backend for part in parts if part.stats} == {"onnx"}
    scores = np.concatenate([part.scores.to_numpy() for part in parts])
    np.testing.assert_allclose(scores, one_at_a_time(tiny_model, queries, passages), atol=1e-5)
    assert len(list(tmp_path.glob("cache/onnx/*"))) == 1


def test_a_timed_layer_has_no_two_products_that_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def seen(file: Path, threads: int) -> Any:
        graphs.append(onnx.load(file).graph)
        return session(file, threads)

    monkeypatch.setattr("rankmill.workers.backends.onnx.backend.session", seen)
    timed_layer(LayerShape(rows=2, hidden=64, inner=128))()
    weights = [each.raw_data for each in graphs[0].initializer if len(each.dims) == 2]
    assert len(set(weights)) == len(weights) == 6
