"""A layer as OpenVINO runs it, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workers.backends.layer import HEAD_WIDTH, ROW_TOKENS, LayerShape
from workers.backends.openvino.backend import compile_graph
from workers.backends.openvino.silent import openvino


def probe(shape: LayerShape, precision: str) -> Callable[[], object]:
    """What runs a layer with random weights once."""
    request = compile_graph(_graph(shape), precision).create_infer_request()
    hidden = _random(shape.rows, ROW_TOKENS, shape.hidden)
    return lambda: request.infer([hidden])


def _graph(shape: LayerShape) -> Any:
    from openvino import opset15 as ops

    width = shape.hidden
    hidden = ops.parameter([-1, -1, width], np.float32)

    def product(states: Any, out: int, into: int) -> Any:
        return ops.matmul(states, ops.constant(_random(out, into) / into**0.5), False, True)

    def by_head() -> Any:
        split = ops.reshape(product(hidden, width, width), [0, 0, width // HEAD_WIDTH, HEAD_WIDTH], True)
        return ops.transpose(split, [0, 2, 1, 3])

    def norm(states: Any) -> Any:
        return ops.mvn(states, [-1], True, 1e-12, "inside_sqrt")

    context = ops.scaled_dot_product_attention(by_head(), by_head(), by_head(), causal=False)
    context = ops.reshape(ops.transpose(context, [0, 2, 1, 3]), [0, 0, width], True)
    first = norm(ops.add(hidden, product(context, width, width)))
    inner = ops.gelu(product(first, shape.inner, width), "erf")
    return openvino.Model([norm(ops.add(first, product(inner, width, shape.inner)))], [hidden], "layer")


def _random(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
