"""Which precision and backend are the fastest on a CPU: measured on it, kept, and never a reason to fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends import auto, openvino, speed, torch
from rankmill.workers.backends.auto import BackendChoice, backends, choose_backend
from rankmill.workers.backends.base import LayerShape, ModelFiles
from rankmill.workers.backends.speed import INT8, Speeds, cpu_speeds, measure
from rankmill.workers.host.device import threads, use_threads
from rankmill.workers.models.loading import load_model
from tests.harness.models.backends import require
from tests.harness.tools import needs_package

SMALL = SimpleNamespace(model_type="bert", hidden_size=128, intermediate_size=512)
OPENVINO, TORCH, ONNX = ("openvino", "torch", "onnx")
FASTEST = "int8-128-bf16"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker that starts."""
    monkeypatch.setattr(speed, "_known", {})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "rankmill.workers")
    return caplog


class Clock:
    """Time that passes only where a layer says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def layer(self, *seconds: float) -> Callable[[], None]:
        """One whose runs take so long, one after the other, and then again."""
        runs = 0

        def run() -> None:
            nonlocal runs
            self.now += seconds[runs % len(seconds)]
            runs += 1

        return run


@pytest.mark.parametrize("backend", [OPENVINO, TORCH, ONNX])
def test_each_backend_is_measured_in_its_own_arithmetic(
    backend: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    require(backend)
    kind = backends()[backend]
    found = cpu_speeds([kind], SMALL, tmp_path)
    expected = {"fp32", "bf16"} & set(kind.precisions["cpu"])
    expected |= set(INT8) if backend == OPENVINO else set()
    able = {precision for precision in expected if kind.lacks("cpu", precision) is None}
    assert set(found.gflops) == {(backend, precision) for precision in able}
    assert all(0.1 < gflops < 10_000 for gflops in found.gflops.values())
    assert "measured in" in log.text
    assert f"{backend} fp32 {found.gflops[backend, 'fp32']:.0f}" in log.text


def test_what_was_measured_is_kept_for_this_machine_and_number_of_threads(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = replace(torch.KIND, timed_layer=lambda shape, precision: lambda: time.sleep(0.001))
    similar = SimpleNamespace(hidden_size=120, intermediate_size=500)

    def measured_again(config: Any = SMALL) -> bool:
        monkeypatch.setattr(speed, "_known", {})
        log.clear()
        assert cpu_speeds([kind], config, tmp_path).gflops
        assert ("as measured before" in log.text) != ("measured in" in log.text)
        return "measured in" in log.text

    assert measured_again()
    assert not measured_again()
    assert not measured_again(similar)
    assert measured_again(SimpleNamespace(hidden_size=384, intermediate_size=1536))
    before = threads()
    try:
        use_threads(before + 1)
        assert measured_again()
    finally:
        use_threads(before)
    monkeypatch.setattr(
        speed, "cpu_flags", lambda: frozenset({"avx2"})
    )  # a folder shared with another machine
    assert measured_again()
    monkeypatch.setattr(speed, "forced_kernels", lambda: ["ONEDNN_MAX_CPU_ISA=AVX2"])
    assert measured_again()
    monkeypatch.setattr(speed, "version", lambda package: "0.1")
    assert measured_again()
    for file in tmp_path.rglob("*.json"):
        file.write_text('{"gflops": {"torch": 7}}')  # no precision
    assert measured_again()


def test_the_best_of_each_counts_whatever_else_the_machine_does() -> None:
    clock = Clock()
    layers = {(TORCH, "fp32"): clock.layer(3.0, 2.0, 9.0), (TORCH, "bf16"): clock.layer(1.0, 50.0)}
    found = measure(layers, 4_000_000_000, clock)
    assert found.gflops == {(TORCH, "fp32"): 2.0, (TORCH, "bf16"): 4.0}
    assert found.fastest(layers) == (TORCH, "bf16")


@pytest.mark.parametrize(
    ("gflops", "expected"),
    [
        ({(OPENVINO, "fp32"): 320, (OPENVINO, "bf16"): 170, (TORCH, "fp32"): 200, (TORCH, "bf16"): 180}, 0),
        ({(OPENVINO, "fp32"): 100, (OPENVINO, "bf16"): 200, (TORCH, "fp32"): 70, (TORCH, "bf16"): 130}, 1),
        ({(OPENVINO, "fp32"): 100, (OPENVINO, "bf16"): 104, (TORCH, "fp32"): 70, (TORCH, "bf16"): 70}, 0),
        ({(OPENVINO, "fp32"): 100, (OPENVINO, "bf16"): 60, (TORCH, "fp32"): 70, (TORCH, "bf16"): 180}, 3),
        ({(OPENVINO, "fp32"): 98, (OPENVINO, "bf16"): 60, (TORCH, "fp32"): 100, (TORCH, "bf16"): 101}, 0),
        ({(TORCH, "fp32"): 98, (TORCH, "bf16"): 150}, 1),
        ({}, None),
    ],
)
def test_auto_is_the_fastest_and_of_equals_the_most_exact(
    gflops: dict[tuple[str, str], float],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    speeds = Speeds(gflops)
    monkeypatch.setattr(auto, "cpu_speeds", lambda *args: speeds)
    pytest.importorskip("openvino")
    chosen = choose_backend("auto", "auto", AutoConfig.for_model("bert"), "cpu", tmp_path)
    assert chosen == (
        BackendChoice("openvino", "fp32") if expected is None else BackendChoice(*list(gflops)[expected])
    )
    if gflops:
        alone = choose_backend("torch", "auto", AutoConfig.for_model("bert"), "cpu", tmp_path)
        assert alone.precision == ("bf16" if gflops[TORCH, "bf16"] > 1.05 * gflops[TORCH, "fp32"] else "fp32")
        given = choose_backend("auto", "bf16", AutoConfig.for_model("bert"), "cpu", tmp_path)
        assert given.precision == "bf16"


@pytest.mark.parametrize(("in_bf16", "gain"), [(300.0, 1.5), (190.0, 1.0)])
def test_what_int8_would_gain_is_known_but_int8_is_never_chosen(
    in_bf16: float, gain: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_package("openvino")
    found = {"fp32": 100.0, "bf16": 200.0, "int8-64": 190.0, "int8-128": 200.0, "int8-128-bf16": in_bf16}
    speeds = Speeds({(OPENVINO, name): speed for name, speed in found.items()})
    monkeypatch.setattr(auto, "cpu_speeds", lambda *args: speeds)
    config = AutoConfig.for_model("bert")
    chosen = choose_backend("auto", "auto", config, "cpu", tmp_path)
    assert (chosen, chosen.int8_gain) == (BackendChoice("openvino", "bf16"), gain)
    assert choose_backend("auto", "fp32", config, "cpu", tmp_path).int8_gain is None  # as was asked for
    assert choose_backend("torch", "auto", config, "cpu", tmp_path).int8_gain is None  # which has no int8
    unknown = AutoConfig.for_model("deberta-v2")  # OpenVINO does not run it, so int8 cannot be had
    assert choose_backend("auto", "auto", unknown, "cpu", tmp_path).int8_gain is None


def test_no_product_of_the_layer_is_left_out_as_the_same_as_another() -> None:
    """As OpenVINO does; the three that attention begins with would count as one."""
    pytest.importorskip("openvino")
    from rankmill.workers.backends.openvino.graph import _layer

    graph = _layer(LayerShape.of(SMALL, 1))
    weights = [node.data for node in graph.get_ops() if node.get_type_name() == "Constant"]
    matrices = [each.tobytes() for each in weights if each.ndim == 2]
    assert len(set(matrices)) == len(matrices) == 6


def test_a_measurement_that_fails_keeps_no_worker_from_scoring(
    tiny_model: Path, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(shape: LayerShape, precision: str) -> Callable[[], object]:
        if precision == "fp32":
            raise MemoryError("no room")
        return lambda: 1 / 0

    for name in (OPENVINO, TORCH, ONNX):
        monkeypatch.setitem(backends(), name, replace(backends()[name], timed_layer=broken))
    model = load_model(ScoreSpec(model=str(tiny_model)), "cpu", "auto", str(tmp_path))
    assert model.backend.precision == "fp32"
    assert "cannot measure torch in fp32: no room" in log.text
    assert "cannot measure torch in bf16: division by zero" in log.text


def test_a_backend_that_cannot_be_imported_keeps_no_worker_from_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise ImportError("libopenvino.so: cannot open shared object file")

    needs_package(OPENVINO)
    monkeypatch.setattr(openvino, "_has_bf16", broken)
    monkeypatch.setitem(backends(), OPENVINO, replace(openvino.KIND, timed_layer=broken))
    for precision in ("auto", "fp32", "bf16", "int8"):
        assert choose_backend("auto", precision, SMALL, "cpu", tmp_path).backend != OPENVINO
    with pytest.raises(WorkerError, match="openvino cannot be used: it cannot be imported"):
        choose_backend(OPENVINO, "bf16", SMALL, "cpu", tmp_path)


def test_without_a_writable_folder_the_next_worker_measures_again(
    tiny_model: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("not a folder")
    load_model(ScoreSpec(model=str(tiny_model)), "cpu", "torch", str(cache))
    assert "the speed of this CPU cannot be kept" in log.text


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({"int8-64": 230.0, "int8-64-bf16": 250.0, "int8-128-bf16": 290.0}, "int8-64-bf16"),  # the most exact
        ({"int8-64": 250.0, "int8-64-bf16": 250.0, "int8-128": 290.0}, "int8-64"),
        ({"int8-64": 200.0, "int8-64-bf16": 220.0, "int8-128": 260.0, "int8-128-bf16": 270.0}, FASTEST),
        ({"int8-64": 200.0, "int8-64-bf16": 220.0, "int8-128": 210.0, "int8-128-bf16": 229.0}, "bf16"),
        ({}, "bf16"),
    ],
)
def test_int8_is_the_most_exact_kind_that_is_worth_it(
    found: dict[str, float],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:
    needs_package("openvino")
    found = {"fp32": 100.0, "bf16": 200.0, **found}
    speeds = Speeds({(OPENVINO, each): speed for each, speed in found.items()})
    monkeypatch.setattr(auto, "cpu_speeds", lambda *args: speeds)
    config = AutoConfig.for_model("bert")
    assert choose_backend("auto", "int8", config, "cpu", tmp_path) == BackendChoice(OPENVINO, chosen)
    assert ("int8 is not worth it on this CPU: bf16 of openvino is used" in log.text) == (chosen == "bf16")
    if chosen != "bf16":  # that it does not score the model as it should is known
        other = choose_backend("auto", "int8", config, "cpu", tmp_path, without={(OPENVINO, chosen)})
        assert other.precision != chosen
    kind = choose_backend("auto", "int8-128", config, "cpu", tmp_path)
    assert kind == BackendChoice(OPENVINO, "int8-128")  # as was asked for
    alone = choose_backend("auto", "int8", config, "cpu", tmp_path, alone=True)
    assert alone == BackendChoice(OPENVINO, "int8-128")  # whatever was measured
    wrong = {(OPENVINO, "int8-128"), (OPENVINO, "int8-64")}
    with pytest.raises(WorkerError, match="it has no right scores of the model in int8-128 or int8-64"):
        choose_backend(OPENVINO, "int8", config, "cpu", tmp_path, alone=True, without=wrong)


@pytest.mark.parametrize("kind", INT8)
def test_openvino_computes_the_kind_of_int8_that_is_asked_for(
    kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    require(OPENVINO, kind)
    config = AutoConfig.from_pretrained(tiny_model)
    backend: Any = openvino.KIND.load(ModelFiles(tiny_model, None, config, tmp_path), "cpu", kind)
    group, rest = INT8[kind]
    assert backend._compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == group
    hint = backend._compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    assert hint == {"fp32": "f32", "bf16": "bf16"}[rest]
    assert backend.precision == kind


def test_similar_models_share_a_measurement() -> None:
    def shape(hidden: int, inner: int) -> tuple[int, int]:
        found = LayerShape.of(SimpleNamespace(hidden_size=hidden, intermediate_size=inner), 1)
        assert 1 <= found.rows <= 16
        return found.hidden, found.inner

    assert shape(384, 1536) == shape(400, 1500) == (384, 1536)
    assert shape(768, 3072) == (768, 3072)
    assert shape(1024, 4096) == (1024, 4096)
    assert shape(32, 128) == (64, 128)
