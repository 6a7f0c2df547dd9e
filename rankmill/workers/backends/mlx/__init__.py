"""The MLX backend for Apple GPUs, which is slow on CPUs and runs there only to test the code."""

from __future__ import annotations

from rankmill.workers.backends.base import Backend, BackendKind, ModelFiles, Rounding
from rankmill.workers.backends.families import BERT_LIKE


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from rankmill.workers.backends.mlx.backend import MlxBackend

    return MlxBackend(files.classifier(), device, precision)


KIND = BackendKind(
    name="mlx",
    extra="mlx",
    preference=4,
    for_tests=frozenset({"cpu"}),
    packages=("mlx",),
    precisions=dict.fromkeys(("cpu", "mps"), ("fp32", "fp16", "bf16", "int8", "int4")),
    load=_load,
    families=BERT_LIKE,
    rounding=Rounding(weights=32, inputs=None),
)
