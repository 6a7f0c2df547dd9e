"""The inputs of a graph, by name."""

from __future__ import annotations

import numpy as np

from workers.models.tokens import Batch, Ids

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the inputs, as transformers has them."""


def inputs_of(batch: Batch) -> dict[str, Ids]:
    """The batch by these names."""
    types = np.zeros_like(batch.ids) if batch.types is None else batch.types
    return dict(zip(INPUTS, (batch.ids, batch.mask, types), strict=True))
