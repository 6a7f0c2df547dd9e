"""One layer of a model with random weights, which backends run to measure their speed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from rankmill.workers.backends.base import HEAD_WIDTH, ROW_TOKENS, LayerShape


def example(shape: LayerShape) -> Tensor:
    """Make random hidden states to run a layer with, ``[rows, tokens, width]``."""
    return torch.randn(shape.rows, ROW_TOKENS, shape.hidden)


class TimedLayer(nn.Module):
    """A layer as in BERT and similar models, with random weights."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        width = shape.hidden
        self.query, self.key, self.value, self.attended = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, shape.inner), nn.Linear(shape.inner, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the hidden states ``[rows, tokens, width]`` after this layer."""
        heads = [
            matrix(hidden).view(*hidden.shape[:2], -1, HEAD_WIDTH).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        ]
        context = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        attended: Tensor = self.norms[0](hidden + self.attended(context))
        output: Tensor = self.norms[1](attended + self.down(gelu(self.up(attended))))
        return output
