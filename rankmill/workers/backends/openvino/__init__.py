"""The OpenVINO backend, for x86 CPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from rankmill.workers.backends.base import ROW, Backend, BackendKind, LayerShape, ModelFiles, Rounding
from rankmill.workers.backends.families import TRACEABLE
from rankmill.workers.backends.speed import INT8


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from rankmill.workers.backends.openvino.backend import OpenVinoBackend
    from rankmill.workers.backends.openvino.graph import openvino_graph

    return OpenVinoBackend(openvino_graph(files, precision), precision, alone=files.alone)


def _timed_layer(shape: LayerShape, precision: str) -> Callable[[], object]:
    from rankmill.workers.backends.openvino.graph import timed_layer

    return timed_layer(shape, precision)


def _lacks(device: str, precision: str) -> str | None:
    if "bf16" in precision and not _has_bf16():
        return "it has no bf16 on this CPU, and would compute in fp32"
    return None


@cache
def _has_bf16() -> bool:
    from rankmill.workers.backends.openvino.backend import core

    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


KIND = BackendKind(
    name="openvino",
    preference=1,
    extra="worker",
    packages=("openvino",),
    machines=("x86_64", "AMD64"),
    precisions={"cpu": ("fp32", "bf16", "int8", *INT8)},
    measured=TRACEABLE,
    load=_load,
    timed_layer=_timed_layer,
    timed=("fp32", "bf16", *INT8),
    lacks=_lacks,
    # This says rows, although OpenVINO rounds in groups. When a model is checked, transformers' model is
    # rounded as this says, and OpenVINO's error may be at most twice the error of transformers. With groups,
    # transformers would have too small an error.
    rounding=Rounding(weights=ROW, inputs=ROW),
    int8=lambda: ("int8-128", "int8-64"),  # kinds with bf16 are left out: not every CPU has bf16
)
