"""Computes a model's last projection (head) in float32, whatever the precision of the other layers.

In bf16 a score has 8 significant bits: of 2,000 pairs, about half would have the same score as another pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def heads_of(classifier: Any) -> list[str]:
    """Return a list with the name of a classifier's last projection, or an empty list if it is not linear."""
    body = f"{classifier.base_model_prefix}."
    heads = [
        name
        for name, module in classifier.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == classifier.config.num_labels
        and not name.startswith(body)
    ]
    return heads[-1:]


def cast_all_but_head(model: Any, dtype: torch.dtype, heads: Sequence[str]) -> None:
    """Cast a model to `dtype`, except its head and the angles of rotary positions, which stay in float32.

    Parameters
    ----------
    model
        A module in float32.
    dtype
        The dtype of all other weights.
    heads
        Names of the model's linear layers that stay in float32.
    """
    exact = {name: ExactHead(model.get_submodule(name)) for name in heads}
    angles = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in angles.items():  # in bf16, angles of distant tokens would be wrong
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], buffer)
    for name, head in exact.items():
        model.set_submodule(name, head)


class ExactHead(nn.Module):
    """A linear layer with few outputs, computed as elementwise products and sums.

    Elementwise products stay in float32 in every backend. Matrix products would not stay in float32: OpenVINO
    computes matrix products in the precision that is set, and quantization and conversion to fp16 change
    them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().float().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn ``[..., width]``, of any dtype, into ``[..., outputs]``."""
        logits = (hidden.float().unsqueeze(-2) * self.weight).sum(-1)
        return logits if self.bias is None else logits + self.bias
