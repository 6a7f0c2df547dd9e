"""PyTorch: runs every model on every device."""

from __future__ import annotations

from collections.abc import Callable

from rankmill.workers.backends.base import Backend, BackendKind, LayerShape, ModelFiles


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from rankmill.workers.backends.torch.backend import TorchBackend
    from rankmill.workers.backends.torch.networks import load_network

    return TorchBackend(load_network(files), device, precision)


def _probe(shape: LayerShape, precision: str) -> Callable[[], object]:
    from rankmill.workers.backends.torch.backend import probe

    return probe(shape, precision)


KIND = BackendKind(
    name="torch",
    extra="worker",
    packages=("torch", "transformers"),
    precisions={"cpu": ("fp32", "bf16"), "cuda": ("fp32", "fp16", "bf16"), "mps": ("fp32", "fp16")},
    load=_load,
    probe=_probe,
    concurrent=True,
)
