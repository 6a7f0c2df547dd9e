# /// script
# dependencies = [
#     "torch==2.13.0",
#     "sentence-transformers[onnx]==5.7.0",  # 6.2.0 and its own extra want different transformers
#     "pyarrow",
# ]
# ///
"""sentence-transformers on ONNX Runtime, in int8."""

from __future__ import annotations

import argparse
import tempfile

from contract import Loaded, arguments, measure
from onnx_export import export_int8
from sentence_transformers import CrossEncoder

BATCH = 32  # the default of CrossEncoder.predict


def load(args: argparse.Namespace) -> Loaded:
    """Export and quantize the model, and load the result."""
    with tempfile.TemporaryDirectory() as folder:
        file = export_int8(args.model, folder)
        model = CrossEncoder(folder, backend="onnx", model_kwargs={"file_name": file})

    def score(queries: list[str], passages: list[str]) -> object:
        pairs = list(zip(queries, passages, strict=True))
        return model.predict(pairs, batch_size=BATCH, show_progress_bar=False)

    return Loaded(score, "int8", f"cpu, {file}, batch {BATCH} (its default); start includes the export")


if __name__ == "__main__":
    measure(arguments(), load, ["sentence-transformers", "optimum-onnx", "onnxruntime"])
