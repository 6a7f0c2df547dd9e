"""Exports a model as ONNX in int8, by sentence-transformers' own export and dynamic quantization."""

from __future__ import annotations

import platform
from pathlib import Path

from sentence_transformers import CrossEncoder, export_dynamic_quantized_onnx_model


def export_int8(model: Path, folder: str) -> str:
    """Write the model into `folder`; returns the path in it of the file for this CPU's instruction set."""
    encoder = CrossEncoder(str(model), backend="onnx", model_kwargs={"export": True})
    encoder.save_pretrained(folder)
    kind = instructions()
    export_dynamic_quantized_onnx_model(encoder, kind, folder)
    (made,) = Path(folder, "onnx").glob(f"model_*int8_{kind}.onnx")  # quint8 for AVX2, qint8 for others
    return str(made.relative_to(folder))


def instructions() -> str:
    """The best instruction set that the quantization supports on this CPU."""
    if platform.machine() in {"arm64", "aarch64"}:
        return "arm64"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_vnni" if "avx512_vnni" in flags else "avx512" if "avx512f" in flags else "avx2"
