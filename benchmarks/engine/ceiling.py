"""Measures the ceiling, which is the pairs a second if only the matrix products took time.

    python -m benchmarks.engine.ceiling MODEL PAIRS.parquet

The command counts the operations of the model's linear layers for a pair of mean length, and times products
of the same shapes on all cores (or the GPU), in large batches, with every installed library that has such
products; the best library and size win. It prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
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
    """Tokens and billions of operations of the mean pair; TFLOP/s, pairs/s and best library by precision."""

    tokens: float
    gflop: float
    tflops: dict[str, float]
    pairs_per_second: dict[str, float]
    libraries: dict[str, str] = field(default_factory=dict)


def measure(model: Path, pairs: Path) -> Ceiling:
    """Measure the ceiling on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = mean_tokens(model, pairs)
    shapes = linear_layers(model)
    operations = 2 * tokens * sum(count * n * m for (n, m), count in shapes.items())
    found: dict[str, tuple[float, str]] = {
        name: max(rates(shapes, name, device), default=(0.0, "")) for name in DTYPES[device]
    }
    return Ceiling(
        tokens=round(tokens, 1),
        gflop=round(operations / 1e9, 3),
        tflops={name: round(rate / 1e12, 3) for name, (rate, _) in found.items()},
        pairs_per_second={name: round(rate / operations, 1) for name, (rate, _) in found.items()},
        libraries={name: library for name, (_, library) in found.items()},
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


def rates(shapes: Counter[Shape], precision: str, device: str) -> list[tuple[float, str]]:
    """Operations a second over all shapes, with the best size of each, and by which library."""
    libraries: dict[str, Products] = {"torch": torch_products}
    if device == "cpu":
        libraries |= {name: make for name, make in _ON_CPUS.items() if find_spec(name)}
    found = []
    for name, make in libraries.items():
        try:
            speeds = [rate(shapes, precision, device, rows, make) for rows in BATCH_TOKENS[device]]
        except Exception as error:  # a library may have no such products on this machine
            print(f"{name} in {precision}: {error}", file=sys.stderr)
            continue
        found.append((max(speeds), name))
    return found


def rate(shapes: Counter[Shape], precision: str, device: str, rows: int, make: Products) -> float:
    """Operations a second over all shapes, with `rows` tokens in a product."""
    seconds = 0.0
    for shape, count in shapes.items():
        run, products = make(shape, precision, device, rows)
        seconds += count * best_seconds(run) / products
    return 2 * rows * sum(count * n * m for (n, m), count in shapes.items()) / seconds


def best_seconds(run: Callable[[], object]) -> float:
    """Seconds of the fastest run, because a ceiling is the best that the machine can do."""
    best = float("inf")
    end = time.perf_counter() + SECONDS
    while (started := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - started)
    return best


Products = Callable[[Shape, str, str, int], tuple[Callable[[], object], int]]
"""Makes a function that runs products of a shape, for a precision, a device and a number of rows; and says
how many products it runs.
"""


def torch_products(shape: Shape, precision: str, device: str, rows: int) -> tuple[Callable[[], object], int]:
    """One product by PyTorch, from and to the precision."""
    dtype = DTYPES[device][precision]
    left = (8 * torch.randn(rows, shape[0], device=device)).to(dtype)
    weight = (8 * torch.randn(shape[1], shape[0], device=device)).to(dtype)
    multiply = _multiply_int8 if dtype == torch.int8 else torch.nn.functional.linear

    @torch.inference_mode()
    def run() -> None:
        multiply(left, weight)
        if device == "cuda":
            torch.cuda.synchronize()

    return run, 1


def _multiply_int8(left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply 8-bit numbers to 32-bit sums, which `torch.nn.functional.linear` cannot do."""
    return torch._int_mm(left, weight.t())


_THERE_AND_BACK = 4
"""Number of pairs of products in a graph, one from ``n`` to ``m`` and one back, so that converting input and
output to the precision counts little.
"""


def _openvino_products(
    shape: Shape, precision: str, _device: str, rows: int
) -> tuple[Callable[[], object], int]:
    """A chain of products by OpenVINO, as the backend compiles them."""
    from openvino import opset15 as ops

    from rankmill.workers.backends.openvino.backend import compile_graph, core, openvino

    if precision == "int8":
        raise ValueError("its 8-bit products quantize their inputs, which is more than a product")
    if precision == "bf16" and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise ValueError("it would compute in fp32")
    random = np.random.default_rng(0)
    hidden = states = ops.parameter([rows, shape[0]], np.float32)
    for _ in range(_THERE_AND_BACK):
        for into, out in (shape, shape[::-1]):
            weights = random.standard_normal((out, into), dtype=np.float32) / into**0.5
            states = ops.matmul(states, ops.constant(weights), False, True)
    graph = openvino.Model([states], [hidden], "products")
    request = compile_graph(graph, precision, {"PERFORMANCE_HINT": "LATENCY"}).create_infer_request()
    request.set_input_tensor(openvino.Tensor(random.standard_normal((rows, shape[0]), dtype=np.float32)))
    return request.infer, 2 * _THERE_AND_BACK


def _onnx_products(shape: Shape, precision: str, _device: str, rows: int) -> tuple[Callable[[], object], int]:
    """One product by ONNX Runtime; of 8 bits, to 32-bit sums."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    if precision == "bf16":
        raise ValueError("it has no such products on CPUs")
    random = np.random.default_rng(0)
    small = precision == "int8"
    weights = random.standard_normal(shape).astype(np.float32)
    left: Any = random.standard_normal((rows, shape[0])).astype(np.float32)
    if small:
        weights, left = (20 * weights).astype(np.int8), (20 * np.abs(left)).astype(np.uint8)
    of, to = (TensorProto.UINT8, TensorProto.INT32) if small else (TensorProto.FLOAT, TensorProto.FLOAT)
    node = helper.make_node("MatMulInteger" if small else "MatMul", ["left", "weights"], ["out"])
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("left", of, [rows, shape[0]])],
        [helper.make_tensor_value_info("out", to, [rows, shape[1]])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    binding.bind_cpu_input("left", left)
    binding.bind_output("out")
    return lambda: session.run_with_iobinding(binding), 1


_ON_CPUS: dict[str, Products] = {"openvino": _openvino_products, "onnxruntime": _onnx_products}


def main() -> None:
    """Print the ceiling as JSON."""
    parser = argparse.ArgumentParser(description="Measure the matrix-product ceiling of this machine.")
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs", type=Path)
    args = parser.parse_args()
    print(json.dumps(asdict(measure(args.model, args.pairs))))


if __name__ == "__main__":
    main()
