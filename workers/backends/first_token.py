"""Compute the last layer for the first token only, where the score reads nothing else.

A BERT-family classifier takes its score from the last hidden state of the first token. In the
last layer every token is needed as key and value; queries, attention output and feed-forward are
needed for the first token only. The score is the same, and a 6-layer model does about 15% less work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from workers.backends.families import reads_first_token


def read_first_token_only(model: Any) -> bool:
    """Replace the last layer of `model`, if its family is known to read the first token only.

    Parameters
    ----------
    model
        A `transformers` sequence classifier, loaded with ``attn_implementation="sdpa"``.

    Returns
    -------
    bool
        Whether the layer was replaced; a model of another family is not changed.
    """
    if not reads_first_token(model.config):
        return False
    wrapper = _DistilBertLayer if model.config.model_type == "distilbert" else _BertLayer
    body = model.base_model
    layers = body.transformer.layer if wrapper is _DistilBertLayer else body.encoder.layer
    layers[-1] = wrapper(layers[-1])
    return True


class _BertLayer(nn.Module):
    """The last layer of BERT and of the families that share its modules."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention = layer.attention
        self.intermediate = layer.intermediate
        self.output = layer.output

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None, *_: Any, **__: Any) -> torch.Tensor:
        """Hidden states ``[rows, tokens, width]`` to those of the first token, ``[rows, 1, width]``."""
        inner, first = self.attention.self, hidden[:, :1]
        heads = inner.num_attention_heads
        context = _attend(inner.query(first), inner.key(hidden), inner.value(hidden), mask, heads)
        attended = self.attention.output(context, first)
        output: torch.Tensor = self.output(self.intermediate(attended), attended)
        return output


class _DistilBertLayer(nn.Module):
    """The last layer of DistilBERT."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention = layer.attention
        self.attention_norm = layer.sa_layer_norm
        self.feed_forward = layer.ffn
        self.output_norm = layer.output_layer_norm

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None, *_: Any, **__: Any) -> torch.Tensor:
        """Hidden states ``[rows, tokens, width]`` to those of the first token, ``[rows, 1, width]``."""
        inner, first = self.attention, hidden[:, :1]
        context = _attend(inner.q_lin(first), inner.k_lin(hidden), inner.v_lin(hidden), mask, inner.n_heads)
        attended = self.attention_norm(inner.out_lin(context) + first)
        output: torch.Tensor = self.output_norm(self.feed_forward(attended) + attended)
        return output


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, heads: int
) -> torch.Tensor:
    """Attention of one query for each row; `mask` is transformers' ``[rows, 1, tokens, tokens]``."""

    def by_head(states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:2], heads, -1).transpose(1, 2)

    row_mask = None if mask is None else mask[:, :, :1]
    context = scaled_dot_product_attention(by_head(query), by_head(key), by_head(value), attn_mask=row_mask)
    return context.transpose(1, 2).flatten(2)
