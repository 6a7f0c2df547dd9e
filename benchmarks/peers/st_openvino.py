# /// script
# dependencies = [
#     "torch==2.13.0",
#     "sentence-transformers[openvino]==6.2.0",
#     "optimum-intel==2.1.0",  # 2.2.0 wants torchvision, whose builds do not load beside every torch
#     "pyarrow",
# ]
# ///
"""sentence-transformers on OpenVINO (optimum-intel), which picks the number format by itself."""

from __future__ import annotations

import argparse

import openvino
from contract import Score, arguments, measure
from sentence_transformers import CrossEncoder

BATCH = 32  # the default of CrossEncoder.predict


def load(args: argparse.Namespace) -> tuple[Score, str]:
    """Export in memory and compile, with optimum-intel's defaults."""
    model = CrossEncoder(str(args.model), backend="openvino", model_kwargs={"export": True})

    def score(queries: list[str], passages: list[str]) -> object:
        pairs = list(zip(queries, passages, strict=True))
        return model.predict(pairs, batch_size=BATCH, show_progress_bar=False)

    precision = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    return score, f"cpu, {precision} (its choice), batch {BATCH} (its default); start includes the export"


if __name__ == "__main__":
    measure(arguments(), load, ["sentence-transformers", "optimum-intel", "openvino"])
