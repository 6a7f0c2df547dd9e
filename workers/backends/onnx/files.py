"""The ONNX file of a model: one that came with it, or one that is exported once and kept."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from transformers.utils import cached_file

from workers.backends.traceable import Traceable
from workers.device import int8_instructions
from workers.disk_cache import digest, made_once

_RECIPE = 1
"""Changes when the same inputs would make another file."""

_OPSET = 17
_FILE = "model.onnx"

logger = logging.getLogger(__name__)


def onnx_file(
    source: str | Path,
    revision: str | None,
    config: Any,
    precision: str,
    cache: Path,
    classifier: Callable[[], Any],
) -> Path:
    """The file to run, made now if need be.

    Parameters
    ----------
    source, revision
        As in `load_config`.
    config
        From `load_config`.
    precision
        ``fp32``, ``fp16`` or ``int8``, whose kind follows the CPU's instructions.
    cache
        Folder for exported files.
    classifier
        Loads the model, in float32, where it has to be exported.
    """
    kind = f"int8-{int8_instructions()}" if precision == "int8" else precision
    shipped = _shipped(source, revision, kind)
    if shipped is not None:
        logger.info("using the model's own %s", shipped.name)
        return shipped
    versions = [version(name) for name in ("torch", "transformers", "onnx", "onnxruntime")]
    name = digest(source, config, str(_RECIPE), str(_OPSET), kind, *versions)

    def export(folder: Path) -> None:
        started = time.monotonic()
        _export(Traceable(classifier()), kind, folder)
        logger.info("exported %s as %s in %.1f s", source, kind, time.monotonic() - started)

    return made_once(cache / "onnx" / name, export) / _FILE


_SHIPPED = {
    "fp32": ["model.onnx"],
    "fp16": ["model_fp16.onnx", "model_O4.onnx"],
    "int8-vnni": ["model_qint8_avx512_vnni.onnx"],
    "int8-avx2": ["model_quint8_avx2.onnx"],
    "int8-arm64": ["model_qint8_arm64.onnx"],
}
"""Names that sentence-transformers and Optimum give to files in the folder ``onnx`` of a model."""


def _shipped(source: str | Path, revision: str | None, kind: str) -> Path | None:
    for name in _SHIPPED[kind]:
        found = cached_file(
            str(source),
            f"onnx/{name}",
            revision=revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found:
            return Path(found)
    return None


@torch.inference_mode()
def _export(scorer: Traceable, kind: str, folder: Path) -> None:
    """Make the file in `folder`.

    By the exporter that traces: the other one takes 5 to 10 times as long, and one more package.
    """
    whole, final = folder / "fp32.onnx", folder / _FILE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that PyTorch fears are fixed; tests vary them
        torch.onnx.export(
            scorer,
            scorer.example(),
            str(whole),
            input_names=list(scorer.inputs),
            output_names=["logits"],
            dynamic_axes={name: {0: "rows", 1: "tokens"} for name in scorer.inputs} | {"logits": {0: "rows"}},
            opset_version=_OPSET,
            dynamo=False,
        )
    if kind == "fp32":
        whole.rename(final)
        return
    if kind == "fp16":
        onnx.save(convert_float_to_float16(onnx.load(whole), keep_io_types=True), final)
    else:
        _quantize(whole, final, kind)
    whole.unlink()


def _quantize(whole: Path, final: Path, kind: str) -> None:
    """Matrices in 8 bits, and what meets them when it does."""
    logging.getLogger().disabled, before = True, logging.getLogger().disabled  # advice of no use here
    try:
        quantize_dynamic(
            whole,
            final,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=kind == "int8-avx2",  # whose sums of products overflow with more than 7 bits
        )
    finally:
        logging.getLogger().disabled = before
