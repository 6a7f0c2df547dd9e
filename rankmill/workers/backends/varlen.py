"""Attention over packed rows, which lie end to end without padding, for transformers' models.

A model whose attention is ``PACKED`` gets all tokens as one row, and a `PackedInput` as the argument
``packed``, which it passes on to `packed_attention`. NVIDIA GPUs have a kernel for this
(`torch.nn.attention.varlen`); on other devices `varlen_reference` computes the same, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "rankmill_packed"
"""Name under which the attention over packed rows is registered with transformers."""

_ASKS_FOR_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether PyTorch's kernel has an argument that says that keys have fewer heads than queries."""

_WITHOUT_EFFECT = frozenset(
    {"dropout", "deterministic", "output_attentions", "position_ids", "token_type_ids", "use_cache"}
)
"""Names of arguments that models pass to their attention and that change nothing in the attention over packed
rows.
"""


@dataclass(frozen=True)
class PackedInput:
    """The rows of a batch end to end without padding (packed), as tensors on a device.

    Attributes
    ----------
    ids, positions, types
        Ids, positions and segment ids, ``[1, tokens]``; ``types`` is ``None`` for models without types.
    starts
        Where each row begins, and where the last row ends, ``[rows + 1]``, int32.
    key_starts
        Where the keys of each row begin, and where those of the last row end, ``[rows + 1]``, int32.
    keys
        Indices of the tokens to which each row attends, row after row, ``[keys]``; ``None`` if each row
        attends only to its own tokens.
    read
        Index of the token that each score reads, ``[scores]``.
    longest, longest_keys
        The largest number of tokens of a row, and the largest number of keys of a row.
    """

    ids: Tensor
    positions: Tensor
    types: Tensor | None
    starts: Tensor
    key_starts: Tensor
    keys: Tensor | None
    read: Tensor
    longest: int
    longest_keys: int

    @property
    def mask(self) -> Tensor:
        """Array ``[rows, longest]`` with 1 for each token of a row and 0 for padding."""
        return (self._places < self.starts.diff()[:, None]).long()

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.longest, device=self.starts.device)

    def padded(self, hidden: Tensor) -> Tensor:
        """Turn the hidden states ``[1, tokens, width]`` of packed tokens into rows that are padded with 0,
        ``[rows, longest, width]``.
        """
        inside = (self.starts[:-1, None] + self._places).clamp(max=hidden.shape[1] - 1)
        return hidden[0][inside].masked_fill(self.mask[:, :, None] == 0, 0)

    def first(self, hidden: Tensor) -> Tensor:
        """Pick the hidden states of each row's first token, ``[rows, 1, width]``, from those of all packed
        tokens.
        """
        return hidden[0][self.read][:, None]

    def attend_first(self, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
        """Compute the attention of each row's first token, ``[rows, 1, width]``, over the tokens of its row.
        Keys and values have the shape ``[1, tokens, width]``.
        """
        ones = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        by_head = [states.reshape(-1, heads, states.shape[-1] // heads) for states in (query, key, value)]
        seen = _varlen(by_head, ones, self.key_starts, 1, self.longest_keys)
        return seen.reshape(query.shape)


@contextmanager
def packing(model: Any) -> Iterator[None]:
    """Within the ``with`` block, make a transformers model use the attention over packed rows. In the block,
    the model takes the argument ``packed`` and makes no attention mask.
    """
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedInput,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention over packed rows, with the arguments that transformers passes to attention
    functions. Takes states ``[1, heads, tokens, width]`` and returns ``[1, tokens, heads, width]``.

    Raises
    ------
    ValueError
        The model needs more than this attention can do, such as soft limits or a bias by position.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise ValueError(f"attention of packed rows has no {', '.join(unknown)}")
    states = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if packed.keys is not None:
        states[1:] = [tensor[packed.keys] for tensor in states[1:]]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # transformers' window includes the token itself
    reach = -1 if sliding_window is None else sliding_window - 1
    seen = _varlen(
        states, packed.starts, packed.key_starts, packed.longest, packed.longest_keys,
        scale=scaling, window_size=(reach, 0 if causal else reach),
    )  # fmt: skip
    return seen[None], None


def _varlen(states: list[Tensor], *lengths: Any, **options: Any) -> Tensor:
    """Compute the attention over packed rows from query, key and value states ``[tokens, heads, width]``.
    Keys may have fewer heads than queries.
    """
    attend: Any = varlen_attn if states[0].is_cuda else varlen_reference
    if states[0].shape[1] != states[1].shape[1] and (attend is varlen_reference or _ASKS_FOR_GROUPS):
        options["enable_gqa"] = True
    seen: Tensor = attend(*states, *lengths, **options)
    return seen


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what `torch.nn.attention.varlen.varlen_attn` does, on any device, in any dtype, row by row."""
    seen = torch.zeros_like(query)
    bounds = zip(*(pairwise(starts.tolist()) for starts in (cu_seq_q, cu_seq_k)), strict=True)
    for (start, end), (key_start, key_end) in bounds:
        if end == start or key_end == key_start:
            continue
        parts = query[start:end], key[key_start:key_end], value[key_start:key_end]
        queries, keys, values = (part.transpose(0, 1)[None] for part in parts)
        within = _within(end - start, key_end - key_start, window_size, query.device)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=within, scale=scale, enable_gqa=enable_gqa
        )
        seen[start:end] = attended[0].transpose(0, 1)
    return seen


def _within(queries: int, keys: int, window: tuple[int, int], device: torch.device) -> Tensor | None:
    """Make the mask of a sliding window, ``[queries, keys]``, or ``None`` without a window.

    The mask is true where a query sees a key. The last query has the position of the last key.
    """
    if window == (-1, -1):
        return None
    back, ahead = (keys + queries if limit < 0 else limit for limit in window)
    places = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = torch.arange(keys, device=device) - places
    return (distance >= -back) & (distance <= ahead)


AttentionInterface.register(PACKED, packed_attention)
