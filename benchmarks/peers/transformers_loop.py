# /// script
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "pyarrow"]
# ///
"""Scores by a plain loop over transformers, with 32 pairs at a time in the input's order, and padding."""

from __future__ import annotations

import argparse

import torch
from contract import Loaded, arguments, measure
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH = 32


def load(args: argparse.Namespace) -> Loaded:
    """fp32, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, dtype=torch.float32)
    model = model.to(device).eval()

    @torch.inference_mode()
    def score(queries: list[str], passages: list[str]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(queries), BATCH):
            part = slice(start, start + BATCH)
            batch = tokenizer(
                queries[part], passages[part], padding=True, truncation=True, return_tensors="pt"
            ).to(device)
            scores += model(**batch).logits[:, 0].tolist()
        return scores

    return Loaded(score, "fp32", f"{device}, fp32, batch {BATCH}, input order, padding=True")


if __name__ == "__main__":
    measure(arguments(), load, ["transformers", "torch"])
