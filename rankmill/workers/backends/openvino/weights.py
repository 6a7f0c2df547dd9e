"""Weights in 8 bits, as OpenVINO's products take them: whole numbers, and a scale for each group of a row.

OpenVINO quantizes the inputs of these products when the model runs, in groups of the same size. NNCF writes
one scale for a whole row; with groups a score is a quarter nearer to that of fp32, at the same speed.
Calibrating inputs on a sample as well made scores worse than any precision here, and no two workers would
have the same sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

KEPT_EXACT = "exact_linear"
"""Name of the module around a layer that stays out of 8 bits; the names of its graph nodes contain it."""

_TAKEN = {("MatMul", 1), ("Gather", 0)}
"""Kinds of nodes that take weights in 8 bits, and at which input: linear layers, embeddings."""

_LEAST = np.float32(1e-30)
"""What a group counts as that has nothing but zeros."""


def shrink(graph: Any, group: int) -> None:
    """Put the weights of a graph's linear layers and embeddings into 8 bits, but for those in `KEPT_EXACT`.

    Products of two computed matrices, and of weights that are cut or turned first, stay as they are.
    """
    for node in graph.get_ops():
        if node.get_type_name() != "Constant" or len(node.get_output_shape(0)) != 2:
            continue
        users = [each for each in node.output(0).get_target_inputs() if _takes(each)]
        if users and node.data.dtype == np.float32:
            small = in_8_bits(node.data, group).output(0)
            for each in users:
                each.replace_source_output(small)


def _takes(port: Any) -> bool:
    """Whether an input of a node takes rows of weights, each for one output or token."""
    node = port.get_node()
    kind = node.get_type_name()
    if (kind, port.get_index()) not in _TAKEN or f".{KEPT_EXACT}/" in node.get_friendly_name():
        return False
    return kind == "Gather" or bool(node.get_attributes()["transpose_b"])


def in_8_bits(weights: npt.NDArray[np.float32], group: int) -> Any:
    """A node that computes weights ``[out, into]`` from 8 bits; `group` of a row, or the row, have one scale.

    The row has one where its length is no multiple of `group`.
    """
    from openvino import opset15 as ops

    rows, width = weights.shape
    parts = weights.reshape(rows, -1, width if width % group else group)
    largest = np.maximum(parts.max(-1, keepdims=True), -parts.min(-1, keepdims=True))
    scale = np.maximum(largest, _LEAST) / np.float32(127)
    steps = parts / scale
    whole = np.rint(steps, out=steps).astype(np.int8)  # no third copy: embeddings may have a gigabyte
    if parts.shape[1] == 1:
        whole, scale = whole[:, 0], scale[:, 0]
    small = ops.multiply(ops.convert(ops.constant(whole), "f32"), ops.constant(scale))
    return small if whole.ndim == 2 else ops.reshape(small, [rows, width], False)
