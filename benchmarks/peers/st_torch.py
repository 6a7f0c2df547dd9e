# /// script
# dependencies = ["torch==2.13.0", "sentence-transformers==6.2.0", "transformers==5.23.0", "pyarrow"]
# ///
"""sentence-transformers on torch, on the GPU where there is one; it sorts by text length itself."""

from __future__ import annotations

import argparse

from contract import Loaded, arguments, measure
from sentence_transformers import CrossEncoder

BATCH = 32  # the default of CrossEncoder.predict
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def load(args: argparse.Namespace) -> Loaded:
    """The model in the number format that the variant names."""
    model = CrossEncoder(str(args.model), model_kwargs={"dtype": DTYPES[args.variant]})

    def score(queries: list[str], passages: list[str]) -> object:
        pairs = list(zip(queries, passages, strict=True))
        return model.predict(pairs, batch_size=BATCH, show_progress_bar=False)

    return Loaded(score, args.variant, f"{model.device.type}, {args.variant}, batch {BATCH} (its default)")


if __name__ == "__main__":
    measure(arguments(choices=DTYPES), load, ["sentence-transformers", "transformers", "torch"])
