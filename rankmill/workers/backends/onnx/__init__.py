"""The ONNX Runtime backend, for CPUs."""

from __future__ import annotations

from collections.abc import Callable

from rankmill.workers.backends.base import MATRIX, ROW, Backend, BackendKind, LayerShape, ModelFiles, Rounding
from rankmill.workers.backends.families import TRACEABLE
from rankmill.workers.host.device import int8_overflows, threads

_INT8 = ("int8-dynamic", "int8-dynamic-7bit")
"""Kinds of int8: inputs are quantized when the model runs (dynamic quantization), and weights have 8 or 7
bits. On CPUs without VNNI, sums of products can overflow with 8 bits, but not with 7. So 7 bits give the same
sums on every CPU.
"""


def _int8() -> tuple[str, ...]:
    return _INT8[1:] if int8_overflows() else _INT8


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from rankmill.workers.backends.onnx.backend import OnnxBackend
    from rankmill.workers.backends.onnx.files import onnx_file

    return OnnxBackend(onnx_file(files, precision), precision, 1 if files.alone else threads())


def _timed_layer(shape: LayerShape, precision: str) -> Callable[[], object]:
    from rankmill.workers.backends.onnx.backend import timed_layer

    return timed_layer(shape)


def _lacks(device: str, precision: str) -> str | None:
    if precision.startswith("int8-") and precision not in _int8():
        return f"{precision} overflows on this CPU, which has no VNNI; use {' or '.join(_int8())}"
    return None


KIND = BackendKind(
    name="onnx",
    extra="onnx",
    preference=3,
    packages=("onnx", "onnxruntime"),
    precisions={"cpu": ("fp32", "int8", *_INT8)},
    measured=TRACEABLE,
    load=_load,
    timed_layer=_timed_layer,
    lacks=_lacks,
    rounding=Rounding(weights=ROW, inputs=MATRIX),
    int8=_int8,
    concurrent=True,
)
