"""The names of a graph's inputs, and a batch as inputs by name."""

from __future__ import annotations

import numpy as np

from rankmill.workers.batches.tokens import Batch, Ids

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the inputs, as in transformers."""


def inputs_of(batch: Batch) -> dict[str, Ids]:
    """The arrays of a batch, by the names in `INPUTS`."""
    types = np.zeros_like(batch.ids) if batch.types is None else batch.types
    return dict(zip(INPUTS, (batch.ids, batch.mask, types), strict=True))
