"""The PyTorch backend, which runs every model on every device."""

from __future__ import annotations

from collections.abc import Callable

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.runtime.installation import install_line
from rankmill.workers.backends.base import (
    ROW,
    Backend,
    BackendKind,
    LayerShape,
    ModelFiles,
    Rounding,
    is_installed,
)
from rankmill.workers.host.device import has_fp8


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from rankmill.workers.backends.torch.backend import DTYPES, TorchBackend
    from rankmill.workers.backends.torch.networks import LanguageModel, load_network
    from rankmill.workers.backends.torch.ways import has_kernel, pack_if_faster, packs_exactly

    network = load_network(files)
    if precision == "fp8" and not isinstance(network, LanguageModel):
        raise SpecError(f"model {files.source} is not a language model, and fp8 is only for those: use bf16")
    packs = not files.alone and has_kernel(device, DTYPES[precision]) and packs_exactly(network)
    backend = TorchBackend(network, device, precision)
    if packs:
        pack_if_faster(backend, network)
    return backend


def _timed_layer(shape: LayerShape, precision: str) -> Callable[[], object]:
    from rankmill.workers.backends.torch.backend import timed_layer

    return timed_layer(shape, precision)


def _lacks(device: str, precision: str) -> str | None:
    if precision != "fp8":
        return None
    if not is_installed("torchao"):
        return f"fp8 needs torchao ({install_line('fp8')})"
    if not has_fp8():
        return "fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper)"
    return None


KIND = BackendKind(
    name="torch",
    preference=2,
    extra="worker",
    packages=("torch", "transformers"),
    added={"fp8": ("torchao",)},
    precisions={"cpu": ("fp32", "bf16"), "cuda": ("fp32", "fp16", "bf16", "fp8"), "mps": ("fp32", "fp16")},
    load=_load,
    timed_layer=_timed_layer,
    rounding=Rounding(weights=ROW, inputs=ROW),
    concurrent=True,
    lacks=_lacks,
)
