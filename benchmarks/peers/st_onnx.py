# /// script
# dependencies = [
#     "torch==2.13.0",
#     "sentence-transformers[onnx]==5.7.0",  # 6.2.0 and its own extra want different transformers
#     "pyarrow",
# ]
# ///
"""sentence-transformers on ONNX Runtime, in fp32 or in int8."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

from contract import Loaded, arguments, measure
from onnx_export import export_int8
from sentence_transformers import CrossEncoder

BATCH = 32  # the default of CrossEncoder.predict


def load(args: argparse.Namespace) -> Loaded:
    """Export the model, for int8 quantize it, and load the result."""
    if args.variant == "fp32":
        exact = CrossEncoder(str(args.model), backend="onnx", model_kwargs={"export": True})
        return Loaded(_scorer(exact), "fp32", f"cpu, batch {BATCH} (its default); start includes the export")
    with tempfile.TemporaryDirectory() as folder:
        file = export_int8(args.model, folder)
        model = CrossEncoder(folder, backend="onnx", model_kwargs={"file_name": file})
    settings = f"cpu, {file}, batch {BATCH} (its default); start includes the export"
    return Loaded(_scorer(model), "int8", settings)


def _scorer(model: CrossEncoder) -> Callable[[list[str], list[str]], object]:
    def score(queries: list[str], passages: list[str]) -> object:
        pairs = list(zip(queries, passages, strict=True))
        return model.predict(pairs, batch_size=BATCH, show_progress_bar=False)

    return score


if __name__ == "__main__":
    measure(
        arguments(choices=["fp32", "int8"]), load, ["sentence-transformers", "optimum-onnx", "onnxruntime"]
    )
