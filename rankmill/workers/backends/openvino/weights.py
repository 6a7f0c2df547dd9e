"""Turns a model's weights into 8-bit whole numbers for OpenVINO, with a scale for each group of a row.

OpenVINO quantizes the inputs of linear layers when the model runs, in groups of the same size. OpenVINO's own
tool (NNCF) would write one scale for a whole row. With groups the speed is the same, and the difference from
scores in fp32 is a quarter smaller. The scales of inputs are not calibrated on a sample of texts: calibration
gave worse scores than any precision that rankmill offers. Besides, each worker would take another sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

KEPT_EXACT = "exact_linear"
"""A layer whose weights must not become 8-bit numbers is held in an attribute of this name. The layer's nodes
in OpenVINO's graph then have names that contain the attribute's name.
"""

_TAKEN = {("MatMul", 1), ("Gather", 0)}
"""Types of graph nodes for linear layers and embeddings, each with the index of the input that takes the
weights.
"""

_LEAST = np.float32(1e-30)
"""Stands for the largest weight of a group whose weights are all 0, because a scale must not be 0."""


def shrink(graph: Any, group: int) -> None:
    """Replace the weights of a graph's linear layers and embeddings by 8-bit numbers, except those held in
    attributes named `KEPT_EXACT`.

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
    """Return whether an input of a graph node takes weights that may become 8-bit numbers. Such weights have
    a row for each output (linear layers) or token (embeddings).
    """
    node = port.get_node()
    kind = node.get_type_name()
    if (kind, port.get_index()) not in _TAKEN or f".{KEPT_EXACT}/" in node.get_friendly_name():
        return False
    return kind == "Gather" or bool(node.get_attributes()["transpose_b"])


def in_8_bits(weights: npt.NDArray[np.float32], group: int) -> Any:
    """Round weights ``[out, into]`` to 8 bits. Returns a graph node that computes the weights from 8-bit
    numbers, with one scale for every `group` values of a row.

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
