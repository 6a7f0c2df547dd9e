"""Puts weights into 8 bits for OpenVINO, as whole numbers with a scale for each group of a row.

OpenVINO quantizes the inputs of linear layers when the model runs, in groups of the same size. OpenVINO's own
tool (NNCF) would write one scale for a whole row. With groups the speed is the same, and scores differ from
those of fp32 by a quarter less. Inputs are not calibrated on a sample: the scores that this gave were worse
than in any precision that is offered here, and each worker would calibrate on another sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

KEPT_EXACT = "exact_linear"
"""Name of the attribute that holds a layer which stays out of 8 bits; the names of the layer's graph nodes
contain this name.
"""

_TAKEN = {("MatMul", 1), ("Gather", 0)}
"""Kinds of nodes for linear layers and embeddings, with the number of the input that takes 8-bit weights."""

_LEAST = np.float32(1e-30)
"""A group of zeros counts as if this were its largest value, so that its scale is not 0."""


def shrink(graph: Any, group: int) -> None:
    """Put the weights of a graph's linear layers and embeddings into 8 bits, except those in `KEPT_EXACT`.

    Products of two computed matrices are not changed, nor are weights that the graph cuts or transposes
    before the product.
    """
    for node in graph.get_ops():
        if node.get_type_name() != "Constant" or len(node.get_output_shape(0)) != 2:
            continue
        users = [port for port in node.output(0).get_target_inputs() if _takes(port)]
        if users and node.data.dtype == np.float32:
            small = in_8_bits(node.data, group).output(0)
            for port in users:
                port.replace_source_output(small)


def _takes(port: Any) -> bool:
    """Whether a node's input takes weights that have a row for each output (linear layers) or token
    (embeddings).
    """
    node = port.get_node()
    kind = node.get_type_name()
    if (kind, port.get_index()) not in _TAKEN or f".{KEPT_EXACT}/" in node.get_friendly_name():
        return False
    return kind == "Gather" or bool(node.get_attributes()["transpose_b"])


def in_8_bits(weights: npt.NDArray[np.float32], group: int) -> Any:
    """A node that computes weights ``[out, into]`` from 8 bits, with one scale for every `group` values of a
    row.

    If `group` does not divide the length of a row, the whole row has one scale.
    """
    from openvino import opset15 as ops

    rows, width = weights.shape
    parts = weights.reshape(rows, -1, width if width % group else group)
    largest = np.maximum(parts.max(-1, keepdims=True), -parts.min(-1, keepdims=True))
    scale = np.maximum(largest, _LEAST) / np.float32(127)
    steps = parts / scale
    whole = np.rint(steps, out=steps).astype(np.int8)  # in place, because embeddings may have a gigabyte
    if parts.shape[1] == 1:
        whole, scale = whole[:, 0], scale[:, 0]
    small = ops.multiply(ops.convert(ops.constant(whole), "f32"), ops.constant(scale))
    return small if whole.ndim == 2 else ops.reshape(small, [rows, width], False)
