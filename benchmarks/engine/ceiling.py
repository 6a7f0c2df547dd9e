"""The ceiling: pairs a second if only the matrix products took time.

    python -m benchmarks.engine.ceiling MODEL PAIRS.parquet

Counts the operations of the model's linear layers for a pair of mean length and times products
of the same shapes on all cores (or the GPU), in large batches, best size wins.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

Shape = tuple[int, int]
"""Inputs and outputs of a linear layer."""

BATCH_TOKENS = {"cpu": (512, 2048, 8192), "cuda": (16_384, 65_536)}
DTYPES = {
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8},
    "cuda": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
}
"""Arithmetics of the matrix products that contenders use on each device."""
SECONDS = 0.3
"""Least seconds to measure each product."""


@dataclass(frozen=True)
class Ceiling:
    """Tokens and billions of operations of the mean pair; TFLOP/s and pairs/s by precision."""

    tokens: float
    gflop: float
    tflops: dict[str, float]
    pairs_per_second: dict[str, float]


def measure(model: Path, pairs: Path) -> Ceiling:
    """Measure the ceiling on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = mean_tokens(model, pairs)
    shapes = linear_layers(model)
    operations = 2 * tokens * sum(count * n * m for (n, m), count in shapes.items())
    rates = {
        name: max(rate(shapes, dtype, device, rows) for rows in BATCH_TOKENS[device])
        for name, dtype in DTYPES[device].items()
    }
    return Ceiling(
        tokens=round(tokens, 1),
        gflop=round(operations / 1e9, 3),
        tflops={name: round(found / 1e12, 3) for name, found in rates.items()},
        pairs_per_second={name: round(found / operations, 1) for name, found in rates.items()},
    )


def mean_tokens(model: Path, pairs: Path) -> float:
    """Mean length of a pair in tokens, truncated as the model needs."""
    table = pq.read_table(pairs, columns=["query", "passage"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(table["query"].to_pylist(), table["passage"].to_pylist(), truncation=True)["input_ids"]
    return sum(map(len, ids)) / len(ids)


def linear_layers(model: Path) -> Counter[Shape]:
    """The linear layers that every token goes through, and how many there are of each shape."""
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    shapes: Counter[Shape] = Counter()

    def seen(layer: torch.nn.Linear, inputs: tuple[torch.Tensor], _output: torch.Tensor) -> None:
        if inputs[0].ndim == 3:  # [sequences, tokens, width]; the head's have one row for each sequence
            shapes[layer.in_features, layer.out_features] += 1

    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(seen)
    with torch.inference_mode():
        network(input_ids=torch.ones(1, 8, dtype=torch.long))
    return shapes


def rate(shapes: Counter[Shape], dtype: torch.dtype, device: str, rows: int) -> float:
    """Operations a second over all shapes, with `rows` tokens in a product."""
    seconds = sum(count * product_seconds(shape, dtype, device, rows) for shape, count in shapes.items())
    return 2 * rows * sum(count * n * m for (n, m), count in shapes.items()) / seconds


@torch.inference_mode()
def product_seconds(shape: Shape, dtype: torch.dtype, device: str, rows: int) -> float:
    """Seconds of the fastest run of a product: a ceiling is the best that the machine can do."""
    left = (8 * torch.randn(rows, shape[0], device=device)).to(dtype)
    weight = (8 * torch.randn(shape[1], shape[0], device=device)).to(dtype)
    multiply = _multiply_int8 if dtype == torch.int8 else torch.nn.functional.linear
    best = float("inf")
    end = time.perf_counter() + SECONDS
    while (started := time.perf_counter()) < end:
        multiply(left, weight)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _multiply_int8(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """8-bit numbers to 32-bit sums; `torch.nn.functional.linear` has no such product."""
    return torch._int_mm(left, weight.t())


def main() -> None:
    """Print the ceiling as JSON."""
    parser = argparse.ArgumentParser(description="Measure the matrix-product ceiling of this machine.")
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs", type=Path)
    args = parser.parse_args()
    print(json.dumps(asdict(measure(args.model, args.pairs))))


if __name__ == "__main__":
    main()
