"""PyTorch: what every model runs with, on every device."""

from __future__ import annotations

from workers.backends.base import Backend, BackendKind, ModelFiles


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from workers.backends.torch.backend import TorchBackend

    return TorchBackend(files.classifier(), device, precision)


KIND = BackendKind(
    name="torch",
    precisions={"cpu": ("fp32", "bf16"), "cuda": ("fp32", "fp16", "bf16"), "mps": ("fp32", "fp16")},
    load=_load,
    any_model=True,
)
