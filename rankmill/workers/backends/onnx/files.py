"""Exports models as ONNX files and caches these files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankmill.jobs.system import system
from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.host.disk_cache import build_once, cache_name, is_kept, kept_as, version

_VERSION = 5
"""Version of the export to ONNX. It changes when the same model would give another file."""

OPSET = 17
_FILE = "model.onnx"

logger = logging.getLogger(__name__)


def onnx_file(files: ModelFiles, precision: str) -> Path:
    """Return the path of a model's ONNX file in the cache. The model is exported now if the cache does not
    have the file.

    Parameters
    ----------
    files
        The model's files.
    precision
        ``fp32``, ``int8-dynamic`` or ``int8-dynamic-7bit``.

    Raises
    ------
    RuntimeError
        The file cannot be written. No `OSError` is raised for this, because another backend, which needs no
        file, may run the model.
    """
    versions = map(version, ("torch", "transformers", "onnx", "onnxruntime"))
    name = cache_name(files.source, files.revision, str(_VERSION), str(OPSET), precision, *versions)
    folder = files.cache / "onnx" / name

    def make(folder: Path) -> None:
        started, whole = system.monotonic(), folder / _FILE
        export(scorer, dict(zip(scorer.inputs, scorer.example(), strict=True)), "logits", whole)
        if precision != "fp32":
            whole = whole.rename(folder / "fp32.onnx")
            _quantize(whole, folder / _FILE, precision)
            whole.unlink()
        # If the model's files have changed meanwhile, this raises an error, so that the cache keeps no wrong
        # export.
        files.check_unchanged()
        logger.info("exported %s as %s in %.1f s", files.source, precision, system.monotonic() - started)

    if not is_kept(folder, files.cache):
        # imported here, because it imports torch, which is not needed if the file is in the cache
        from rankmill.workers.backends.traceable import traceable

        scorer = traceable(files)
        try:
            build_once(folder, make)
        except OSError as error:
            raise RuntimeError(f"its ONNX file cannot be kept in {folder.parent} ({error})") from error
    files.copies.append(kept_as(folder))
    return folder / _FILE


def export(module: Any, example: Mapping[str, Any], output: str, file: Path) -> None:
    """Write a PyTorch module as an ONNX file for any number of rows and tokens.

    The module is traced with the inputs in `example`, which are given by name.

    PyTorch's newer exporter, which does not trace, is not used: it takes 5 to 10 times as long and needs
    another package.
    """
    import torch

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # PyTorch warns that shapes may be fixed; tests vary them
        torch.onnx.export(
            module,
            tuple(example.values()),
            str(file),
            input_names=list(example),
            output_names=[output],
            dynamic_axes={name: {0: "rows", 1: "tokens"} for name in example} | {output: {0: "rows"}},
            opset_version=OPSET,
            dynamo=False,
        )


def _quantize(whole: Path, final: Path, precision: str) -> None:
    """Quantize the weights of matrix products in the fp32 file `whole` to 8 or 7 bits, and write `final`. The
    other inputs of the products are quantized when the model runs (dynamic quantization).
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # no logs, because `quantize_dynamic` would advise to change the model first
    logging.getLogger().disabled, before = True, logging.getLogger().disabled
    try:
        quantize_dynamic(
            whole,
            final,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=precision.endswith("7bit"),
        )
    finally:
        logging.getLogger().disabled = before
