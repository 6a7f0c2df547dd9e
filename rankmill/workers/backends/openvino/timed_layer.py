"""Times a layer in OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rankmill.workers.backends.base import HEAD_WIDTH, ROW_TOKENS, LayerShape
from rankmill.workers.backends.openvino.backend import compile_graph
from rankmill.workers.backends.openvino.core import openvino
from rankmill.workers.backends.openvino.weights import shrink
from rankmill.workers.backends.speed import INT8


def timed_layer(shape: LayerShape, precision: str) -> Callable[[], object]:
    """Make a function that runs a layer with random weights once, in fp32, bf16 or a kind of int8."""
    graph = _graph(shape)
    if precision in INT8:
        shrink(graph, INT8[precision][0])
    request = compile_graph(graph, precision).create_infer_request()
    hidden = np.random.default_rng(0).standard_normal(
        (shape.rows, ROW_TOKENS, shape.hidden), dtype=np.float32
    )
    return lambda: request.infer([hidden])


def _graph(shape: LayerShape) -> Any:
    from openvino import opset15 as ops

    width, random = shape.hidden, np.random.default_rng(0)
    hidden = ops.parameter([-1, -1, width], np.float32)

    def product(states: Any, out: int, into: int) -> Any:
        # Each product has its own weights, because OpenVINO computes equal products only once.
        weights = random.standard_normal((out, into), dtype=np.float32) / into**0.5
        return ops.matmul(states, ops.constant(weights), False, True)

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
