"""A layer as ONNX Runtime runs it, for timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rankmill.workers.backends.layer import HEAD_WIDTH, ROW_TOKENS, LayerShape
from rankmill.workers.backends.onnx.backend import session
from rankmill.workers.backends.onnx.files import OPSET

_NODES = [
    *((f"{name}_all", "MatMul", ["hidden", f"w_{name}"], {}) for name in ("query", "key", "value")),
    *((f"{name}_split", "Reshape", [f"{name}_all", "split"], {}) for name in ("query", "key", "value")),
    ("query", "Transpose", ["query_split"], {"perm": [0, 2, 1, 3]}),
    ("key", "Transpose", ["key_split"], {"perm": [0, 2, 3, 1]}),
    ("value", "Transpose", ["value_split"], {"perm": [0, 2, 1, 3]}),
    ("products", "MatMul", ["query", "key"], {}),
    ("scaled", "Mul", ["products", "scale"], {}),
    ("shares", "Softmax", ["scaled"], {}),
    ("context_split", "MatMul", ["shares", "value"], {}),
    ("context_all", "Transpose", ["context_split"], {"perm": [0, 2, 1, 3]}),
    ("context", "Reshape", ["context_all", "join"], {}),
    ("attended", "MatMul", ["context", "w_attended"], {}),
    ("attended_sum", "Add", ["hidden", "attended"], {}),
    ("first", "LayerNormalization", ["attended_sum", "ones"], {}),
    ("up", "MatMul", ["first", "w_up"], {}),
    ("up_scaled", "Div", ["up", "root_of_2"], {}),  # this and the next four are GELU, which is fused
    ("up_erf", "Erf", ["up_scaled"], {}),
    ("up_erf_more", "Add", ["up_erf", "one"], {}),
    ("up_twice", "Mul", ["up", "up_erf_more"], {}),
    ("inner", "Mul", ["up_twice", "half"], {}),
    ("down", "MatMul", ["inner", "w_down"], {}),
    ("down_sum", "Add", ["first", "down"], {}),
    ("output", "LayerNormalization", ["down_sum", "ones"], {}),
]
"""Output, operation, inputs and attributes of each node, in order."""


def probe(shape: LayerShape) -> Callable[[], object]:
    """A function that runs a layer with random weights once, in fp32."""
    width, inner, generator = shape.hidden, shape.inner, np.random.default_rng(0)

    def random(*dimensions: int) -> Any:
        # Each array differs: of equal products, a runtime may compute only one.
        numbers = generator.standard_normal(dimensions, dtype=np.float32)
        return numbers / np.float32(dimensions[0] ** 0.5)

    hidden = random(shape.rows, ROW_TOKENS, width)
    constants = {
        **{f"w_{name}": random(width, width) for name in ("query", "key", "value", "attended")},
        "w_up": random(width, inner),
        "w_down": random(inner, width),
        "split": np.array([0, 0, width // HEAD_WIDTH, HEAD_WIDTH]),
        "join": np.array([0, 0, width]),
        "scale": np.float32(HEAD_WIDTH**-0.5),
        "root_of_2": np.float32(2**0.5),
        "ones": np.ones(width, np.float32),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    graph = helper.make_graph(
        [helper.make_node(operation, into, [out], **more) for out, operation, into, more in _NODES],
        "layer",
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, hidden.shape)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, hidden.shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "layer.onnx"
        onnx.save(model, file)
        ready = session(file, "cpu")
    return lambda: ready.run(None, {"hidden": hidden})
