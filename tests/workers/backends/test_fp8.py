"""fp8 of PyTorch: torchao's own code on this CPU, which is told that it may."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.installation import install_line
from rankmill.workers.backends import torch as kind_of_torch
from rankmill.workers.backends.auto import BackendChoice, backends, choose_backend
from rankmill.workers.backends.base import ROW, Logits
from rankmill.workers.backends.torch import backend as torch_backend
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host import device
from rankmill.workers.models.loading import Loaded
from rankmill.workers.models.reference import _rounded
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_decoder
from tests.harness.models.tiny import make_bert
from tests.harness.tools import needs_package, slow_but
from tests.workers.backends.test_backends import CACHE
from tests.workers.engine.test_engine import some_pairs

Patch = pytest.MonkeyPatch

PAIRS = some_pairs(24)


@pytest.fixture
def on_this_cpu(monkeypatch: Patch) -> None:
    """Let PyTorch take fp8 on a CPU: it and torchao are told that the hardware has it."""
    needs_package("torchao")
    from torchao.quantization import quant_api

    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    kind = backends()["torch"]
    able = replace(kind, precisions={"cpu": ("fp32", "bf16", "fp8")}, lacks=lambda device, precision: None)
    monkeypatch.setitem(backends(), "torch", able)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder") / "model"
    return make_decoder(folder, "qwen3", task="causal", template=PAIR_TEMPLATE, num_hidden_layers=2)


def in_fp8(model: Path, cache: Path) -> Loaded:
    return load_proven(ScoreSpec(model=str(model), precision="fp8"), "cpu", "torch", str(cache))


def network_of(loaded: Loaded) -> Any:
    assert isinstance(loaded.backend, torch_backend.TorchBackend)
    return loaded.backend.network


def linear_layers(network: nn.Module) -> list[Any]:
    return [each for each in network.modules() if isinstance(each, nn.Linear)]


def logits(loaded: Loaded, model: Path) -> Logits:
    spec = ScoreSpec(model=str(model), activation="identity")
    return Engine(loaded.model(spec), 512).score(*PAIRS).scores


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize("task", slow_but(["causal", "classifier"], "causal"))
def test_a_language_model_scores_within_what_transformers_is_off_by(
    task: str, decoder: Path, tmp_path: Path
) -> None:
    model = decoder
    if task == "classifier":
        model = make_decoder(tmp_path / "model", "llama", task=task, template=PAIR_TEMPLATE)
    loaded = in_fp8(model, tmp_path / "cache")
    proof, layers = loaded.proof, linear_layers(network_of(loaded))
    assert proof is not None
    assert proof.holds
    assert proof.bound == pytest.approx(2 * proof.own)
    assert proof.own > 0
    assert "torchao" in proof.versions
    assert len(layers) >= 14  # seven in a layer: nothing but the last projection is left out
    assert {type(each.weight).__name__ for each in layers} == {"Float8Tensor"}
    parts = [getattr(each.weight, part) for each in layers for part in ("qdata", "scale")]
    assert {part.dtype for part in parts[::2]} == {torch.float8_e4m3fn}
    plain = [each for each in network_of(loaded).state_dict().values() if type(each) is torch.Tensor]
    assert loaded.backend.bytes == sum(each.nbytes for each in [*plain, *parts])

    exact = load_proven(
        ScoreSpec(model=str(model), precision="fp32"), "cpu", "torch", str(tmp_path / "cache")
    )
    scores, expected = (logits(each, model) for each in (loaded, exact))
    assert 1e-3 < np.abs(scores - expected).max() < proof.bound
    assert (scores.astype(np.float16) != scores).any()  # the last projection and the score have 32 bits


def scales_of(network: nn.Module) -> list[Any]:
    return [each.weight.scale for each in linear_layers(network)]


def a_wrong_scale(network: nn.Module) -> None:
    scales_of(network)[-1].mul_(4)


def scales_of_other_rows(network: nn.Module) -> None:
    for scale in scales_of(network):
        scale.copy_(scale.flip(0))


def no_number(network: nn.Module) -> None:
    scales_of(network)[-1].mul_(np.nan)


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize(
    "plant", slow_but([a_wrong_scale, scales_of_other_rows, no_number], a_wrong_scale, no_number)
)
def test_what_is_planted_is_refused(
    plant: Callable[[nn.Module], None], decoder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    rounds = torch_backend.round_linear_layers

    def wrongly(network: nn.Module) -> None:
        rounds(network)
        plant(network)

    monkeypatch.setattr(torch_backend, "round_linear_layers", wrongly)
    with pytest.raises(WorkerError, match=r"would not get its own scores") as refused:
        in_fp8(decoder, tmp_path / "cache")
    assert "torch fp8 on cpu" in str(refused.value)


@pytest.mark.usefixtures("on_this_cpu")
def test_fp8_refuses_models_that_are_not_language_models(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match="/model is not a language model, and fp8 is only for those: use bf16"
    ):
        in_fp8(make_bert(tmp_path / "model"), tmp_path / "cache")


@pytest.mark.usefixtures("on_this_cpu")
def test_transformers_is_rounded_as_torchao_rounds() -> None:
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import Float8Tensor

    torch.manual_seed(0)
    values = torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    theirs = Float8Tensor.from_hp(values, granularity=PerRow()).dequantize()
    torch.testing.assert_close(_rounded(values, "fp8", ROW), theirs, rtol=1e-6, atol=0)
    assert 0.01 < ((values - theirs) / values).abs().max() < 0.07  # a sixteenth


@pytest.mark.usefixtures("on_this_cpu")
def test_a_token_depends_on_no_other_and_may_be_zero() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)).to(torch.bfloat16)
    states = torch.randn(9, 32, dtype=torch.bfloat16)
    states[3] = 0
    torch_backend.round_linear_layers(network)
    assert torch.get_float32_matmul_precision() == "highest"
    with torch.inference_mode():
        alone = network(states)
        beside = network(torch.cat([states, 1000 * torch.randn_like(states)]))[:9]
    assert alone.isfinite().all()
    torch.testing.assert_close(alone, beside)
    assert type(network[1].weight) is nn.Parameter  # 8 outputs: no kernel takes so few


def test_without_hardware_or_package_a_worker_says_what_is_missing(monkeypatch: Patch) -> None:
    config = AutoConfig.for_model("qwen3")
    with pytest.raises(SpecError, match="fp8 is not supported on cpu by backend torch; use fp32 or bf16"):
        choose_backend("torch", "fp8", config, "cpu", CACHE)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(WorkerError, match=re.escape(f"torchao ({install_line('fp8')}); use another precis")):
        choose_backend("torch", "fp8", config, "cuda", CACHE)
    monkeypatch.setattr(kind_of_torch, "is_installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, able in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert device.has_fp8() is able
        if able:
            assert choose_backend("auto", "fp8", config, "cuda", CACHE) == BackendChoice("torch", "fp8")
            continue
        with pytest.raises(WorkerError, match=r"GPU of compute capability 8\.9 or later .*; use another"):
            choose_backend("auto", "fp8", config, "cuda", CACHE)


def test_nobody_gets_it_who_does_not_ask(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    config = AutoConfig.for_model("qwen3")
    assert choose_backend("auto", "auto", config, "cuda", CACHE) == BackendChoice("torch", "bf16")
    assert choose_backend(
        "auto", "auto", config, "cuda", CACHE, without=[("torch", "bf16")]
    ) == BackendChoice("torch", "fp32")
