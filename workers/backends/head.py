"""The last projection, in float32 whatever the precision of the rest.

In bf16 a score would have 8 significant bits: of 2,000 pairs about half would share theirs with another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast_all_but_head(model: Any, dtype: torch.dtype) -> None:
    """Give a model another dtype, but let its head compute in float32, with the weights that it has now.

    Parameters
    ----------
    model
        A `transformers` sequence classifier with one output, in float32. One whose head is no linear
        layer is cast as a whole.
    dtype
        Of everything else.
    """
    heads = {
        name: ExactHead(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == 1
    }
    model.to(dtype)
    for name, head in heads.items():
        model.set_submodule(name, head)


class ExactHead(nn.Module):
    """A linear layer with one output, as a product and a sum.

    Those stay in float32 wherever the graph goes: OpenVINO computes matrix products in the precision
    asked for, and quantization and conversions to fp16 look for them, but not for these.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().float().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]``, of any dtype, to ``[..., 1]``."""
        logits = (hidden.float() * self.weight).sum(-1, keepdim=True)
        return logits if self.bias is None else logits + self.bias
