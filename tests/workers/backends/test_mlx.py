"""MLX, on the CPU: the modules that an Apple GPU would run score as plain transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from rankmill import Client
from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.auto import BackendChoice, choose_backend
from rankmill.workers.backends.base import Logits
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.models.loading import load_model
from tests.conftest import Server, StartWorker
from tests.harness.models.rerankers import make_encoder
from tests.harness.models.tiny import make_bert
from tests.workers.backends.test_backends import CACHE, EXAMPLES, plain_logits, some_batch
from tests.workers.backends.test_first_token import FAMILIES, SMALL, small_model
from tests.workers.engine.test_engine import one_at_a_time, some_pairs

SHAPES = [(5, 20), (1, 2), (3, 61), (17, 33), (2, 16)]
PAIRS = some_pairs(60)


@pytest.fixture(scope="module")
def mlx_backend() -> Any:
    pytest.importorskip("mlx.core")
    from rankmill.workers.backends.mlx.backend import MlxBackend

    return MlxBackend


def worst_difference(plain: Any, backend: Any) -> float:
    types = getattr(plain.config, "type_vocab_size", 0)
    batches = [some_batch(*shape, types) for shape in SHAPES]
    pending = [backend.submit(batch) for batch in batches]  # all under way at a time
    return max(
        float(np.abs(forward.result() - plain_logits(plain, batch)).max())
        for batch, forward in zip(batches, pending, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scores_as_in_transformers(family: str, mlx_backend: Any) -> None:
    plain = small_model(family, FAMILIES[family])
    assert worst_difference(plain, mlx_backend(plain, "cpu", "fp32")) < 1e-4
    # Scores reach 3 here, by weights that are wider than a trained model's.
    assert worst_difference(plain, mlx_backend(plain, "cpu", "fp16")) < 3e-2
    assert worst_difference(plain, mlx_backend(plain, "cpu", "bf16")) < 3e-1


def test_compiled_for_rounded_shapes_it_scores_the_same(mlx_backend: Any) -> None:
    plain = small_model(
        "roberta", {**SMALL, "max_position_embeddings": 63}
    )  # 61 tokens, rounded up, do not fit
    assert worst_difference(plain, mlx_backend(plain, "cpu", "fp32", compiled=True)) < 1e-4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("small"), hidden=64, layers=3)


@pytest.fixture(scope="module")
def exact(small: Path) -> Logits:
    return one_at_a_time(small, *PAIRS)


@pytest.mark.parametrize(
    ("precision", "difference", "correlation"),
    [
        ("fp32", 1e-4, 1),
        pytest.param("fp16", 1e-2, 0.999, marks=pytest.mark.slow),
        pytest.param("bf16", 0.1, 0.99, marks=pytest.mark.slow),
        ("int8", 0.1, 0.99),
        pytest.param("int4", 1, 0.9, marks=pytest.mark.slow),
    ],
)
def test_each_precision_is_proven_and_ranks_as_fp32_does(
    precision: str,
    difference: float,
    correlation: float,
    small: Path,
    exact: Logits,
    mlx_backend: Any,
    tmp_path: Path,
) -> None:
    asked = {"model": str(small), "precision": precision, "activation": "identity"}
    spec = ScoreSpec.model_validate(asked)
    model = load_proven(spec, "cpu", "mlx", str(tmp_path)).model(spec)
    assert (model.backend.name, model.backend.precision.removesuffix(" weights")) == ("mlx", precision)
    scores = Engine(model, 4096).score(*PAIRS).scores
    assert np.abs(scores - exact).max() < difference
    ranks = scores.argsort().argsort(), exact.argsort().argsort()
    assert np.min(np.corrcoef(ranks)) >= correlation - 1e-9


def test_a_text_may_name_the_token_of_padding(tmp_path: Path) -> None:
    """A probe does; MLX was refused for all families whose positions do not count that token."""
    pytest.importorskip("mlx.core")
    model = make_encoder(tmp_path / "model", "roberta")
    spec = ScoreSpec(model=str(model), precision="fp32")
    assert load_proven(spec, "cpu", "mlx", str(tmp_path)).backend.name == "mlx"


def test_fewer_bits_are_there_only_where_they_are_asked_for(mlx_backend: Any) -> None:
    config = AutoConfig.for_model("bert")
    assert choose_backend("mlx", "auto", config, "mps", CACHE) == BackendChoice("mlx", "fp16")
    assert choose_backend("auto", "auto", config, "mps", CACHE) == BackendChoice("torch", "fp16")
    assert choose_backend("auto", "int4", config, "mps", CACHE) == BackendChoice("mlx", "int4")
    with pytest.raises(SpecError, match="precision int4 is not supported on cuda; use fp32, fp16, bf16 or f"):
        choose_backend("auto", "int4", config, "cuda", CACHE)
    with pytest.raises(SpecError, match="mlx cannot be used: it runs on CPUs and Apple GPUs, not on cuda"):
        choose_backend("mlx", "fp16", config, "cuda", CACHE)
    with pytest.raises(SpecError, match="mlx cannot be used: it has no modules for albert models"):
        choose_backend("mlx", "auto", AutoConfig.for_model("albert"), "cpu", CACHE)


def test_an_activation_function_it_does_not_have(mlx_backend: Any, tmp_path: Path) -> None:
    make_bert(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    model.config.hidden_act = "silu"
    model.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="backend mlx cannot be used: it has no activation function silu"):
        load_model(ScoreSpec(model=str(tmp_path)), "cpu", "mlx")


@pytest.mark.slow
def test_a_worker_scores_with_it(
    server: Server, workers: StartWorker, mlx_backend: Any, tmp_path: Path
) -> None:
    make_bert(tmp_path)  # a small one: MLX's fp16 is slow on CPUs
    workers(environ={"RANKMILL_BACKEND": "mlx", "RANKMILL_DEVICE": "cpu"})
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()][:6]
    queries, passages = [row["query"] for row in rows], [row["passage"] for row in rows]
    client = Client(server.url, model=str(tmp_path), precision="fp16", activation="identity")
    run = client.submit(zip(queries, passages, strict=True))
    (part,) = run.tables()
    assert part.stats is not None
    assert (part.stats.backend, part.stats.precision) == ("mlx", "fp16")
    np.testing.assert_allclose(part.scores, one_at_a_time(tmp_path, queries, passages), atol=1e-2)


@pytest.mark.slow
def test_nothing_touches_a_device_before_a_worker_does() -> None:
    """A context belongs to the process that made it: a parent that has one gives its children none."""
    code = """
import sys
import rankmill.jobs, producer, workers
from rankmill import ScoringWorker
import rankmill.cli.score, rankmill.cli.workers, producer.local.supervisor
print(sorted({"torch", "mlx", "mlx.core", "openvino", "onnxruntime", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
