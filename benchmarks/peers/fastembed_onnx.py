# /// script
# dependencies = [
#     "torch==2.13.0",
#     "fastembed==0.9.1",
#     "sentence-transformers[onnx]==5.7.0",  # only to export the model
#     "pyarrow",
# ]
# ///
"""fastembed, the model registered as a custom cross-encoder of its own."""

from __future__ import annotations

import argparse
import tempfile

from contract import Loaded, arguments, measure
from fastembed.common.model_description import ModelSource
from fastembed.rerank.cross_encoder import TextCrossEncoder
from onnx_export import export_int8

BATCH = 64  # the default of TextCrossEncoder.rerank_pairs


def load(args: argparse.Namespace) -> Loaded:
    """Export, quantize, register and load the model."""
    with tempfile.TemporaryDirectory() as folder:
        file = export_int8(args.model, folder)
        TextCrossEncoder.add_custom_model("custom", ModelSource(hf="custom/custom"), model_file=file)
        model = TextCrossEncoder("custom", specific_model_path=folder)

    def score(queries: list[str], passages: list[str]) -> list[float]:
        return list(model.rerank_pairs(list(zip(queries, passages, strict=True)), batch_size=BATCH))

    return Loaded(
        score, "int8", f"cpu, {file}, batch {BATCH} (its default), input order; start includes the export"
    )


if __name__ == "__main__":
    measure(arguments(), load, ["fastembed", "onnxruntime"])
