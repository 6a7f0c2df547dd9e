"""PyTorch: runs every model on every device."""

from __future__ import annotations

from collections.abc import Callable

from rankmill.workers.backends.base import Backend, BackendKind, LayerShape, ModelFiles


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from rankmill.workers.backends.torch.backend import DTYPES, TorchBackend
    from rankmill.workers.backends.torch.networks import load_network
    from rankmill.workers.backends.torch.ways import kernel_lacks, pack_if_faster, packs_exactly

    network = load_network(files)
    packs = not files.alone and kernel_lacks(device, DTYPES[precision]) is None and packs_exactly(network)
    backend = TorchBackend(network, device, precision)
    if packs:
        pack_if_faster(backend, network)
    return backend


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
