# /// script
# dependencies = [
#     "torch==2.13.0",
#     "sentence-transformers[openvino]==6.2.0",
#     "optimum-intel==2.1.0",  # 2.2.0 wants torchvision, whose builds do not load beside every torch
#     "datasets==5.0.1",  # for the quantization
#     "pyarrow",
# ]
# ///
"""sentence-transformers on OpenVINO (optimum-intel): with its defaults, set to fp32, or in int8.

int8 is its own static quantization, by NNCF, calibrated on `CALIBRATION` of the pairs to be scored.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import openvino
import pyarrow as pa
import pyarrow.parquet as pq
from contract import Loaded, arguments, measure
from sentence_transformers import CrossEncoder

BATCH = 32  # the default of CrossEncoder.predict
CALIBRATION = 200
COLUMN = "pair"


def load(args: argparse.Namespace) -> Loaded:
    """Export in memory, or quantize, and compile, with optimum-intel's defaults."""
    if args.variant == "int8":
        model, how = (
            quantized(args.model, args.pairs, args.output.parent),
            f"int8, calibrated on {CALIBRATION} pairs",
        )
        precision = "int8"
    elif args.variant == "fp32":
        model, how, precision = (
            exported(args.model, INFERENCE_PRECISION_HINT="f32"),
            "f32 (ov_config)",
            "fp32",
        )
    else:
        model = exported(args.model)
        own = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        how, precision = f"{own} (its choice)", {"f32": "fp32", "f16": "fp16"}.get(own, own)

    def score(queries: list[str], passages: list[str]) -> object:
        pairs = list(zip(queries, passages, strict=True))
        return model.predict(pairs, batch_size=BATCH, show_progress_bar=False)

    settings = f"cpu, {how}, batch {BATCH} (its default); start includes the export or quantization"
    return Loaded(score, precision, settings)


def exported(model: Path, **options: str) -> CrossEncoder:
    """The model, converted in memory."""
    settings: dict[str, Any] = {"export": True, **({"ov_config": options} if options else {})}
    return CrossEncoder(str(model), backend="openvino", model_kwargs=settings)


def quantized(model: Path, pairs: Path, home: Path) -> CrossEncoder:
    """The model, quantized by sentence-transformers' own export with pairs spread over the file.

    The quantization takes minutes, so the model is kept in `home` for the next round.
    """
    weights = [file.stat().st_mtime_ns for file in sorted(model.glob("*.safetensors"))]
    made_from = f"{model.resolve()} {weights} {hashlib.sha256(pairs.read_bytes()).hexdigest()}"
    folder, stamp = home / "st_openvino_int8", home / "st_openvino_int8" / "made_from"
    if not stamp.exists() or stamp.read_text() != made_from:
        shutil.rmtree(folder, ignore_errors=True)
        quantize(model, pairs, folder)
        stamp.write_text(made_from)
    file = {"file_name": "openvino/openvino_model_qint8_quantized.xml"}
    return CrossEncoder(str(folder), backend="openvino", model_kwargs=file)


def quantize(model: Path, pairs: Path, folder: Path) -> None:
    """Export, quantize and save."""
    from optimum.intel import OVQuantizationConfig
    from sentence_transformers import export_static_quantized_openvino_model

    with tempfile.TemporaryDirectory() as name:
        every = pq.read_table(pairs, columns=["query", "passage"]).to_pylist()
        some = every[:: max(1, len(every) // CALIBRATION)][:CALIBRATION]
        texts = [[row["query"], row["passage"]] for row in some]
        pq.write_table(pa.table({COLUMN: texts}), Path(name) / "train.parquet")
        encoder = exported(model)
        encoder.save_pretrained(str(folder))
        export_static_quantized_openvino_model(
            encoder,
            OVQuantizationConfig(num_samples=CALIBRATION),
            str(folder),
            dataset_name=name,
            dataset_config_name="default",
            dataset_split="train",
            column_name=COLUMN,
        )


if __name__ == "__main__":
    packages = ["sentence-transformers", "optimum-intel", "openvino"]
    measure(arguments(choices=["auto", "fp32", "int8"]), load, packages)
