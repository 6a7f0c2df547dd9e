"""Cuts rows into batches by their lengths; pure functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]


def plan_batches(
    lengths: npt.ArrayLike,
    token_budget: int,
    *,
    max_batch: int | None = None,
    length_aware: bool = True,
    groups: npt.ArrayLike | None = None,
) -> list[Rows]:
    """Cut rows into batches of similar length, the longest first.

    Sorting keeps padding low; cutting by padded tokens (rows times the longest row) instead of
    by rows keeps every batch equally heavy; the longest first makes the first batch the one
    that needs the most memory.

    Parameters
    ----------
    lengths
        Tokens in each row, shape ``[n]``.
    token_budget
        Padded tokens in a batch, at most. A longer row becomes a batch of its own.
    max_batch
        Rows in a batch, at most.
    length_aware
        Whether to sort by length; without it rows keep their order (to measure the gain from sorting).
    groups
        Rows of an equal number, shape ``[n]``, stay together, sorted by length: their batches share a
        beginning. Rows of number 0 share nothing.

    Returns
    -------
    list of int arrays
        Row indices of each batch; every row is in exactly one.

    >>> [batch.tolist() for batch in plan_batches([3, 9, 4, 8], token_budget=18)]
    [[1, 3], [2, 0]]
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    order = np.arange(len(tokens))
    if length_aware:
        order = np.lexsort([-tokens, np.zeros_like(tokens) if groups is None else np.asarray(groups)])
    batches = []
    start = 0
    while start < len(order):
        following = tokens[order[start : start + token_budget]]
        rows = _rows_that_fit(following, token_budget, length_aware and groups is None)
        rows = min(rows, max_batch or rows)
        batches.append(order[start : start + rows])
        start += rows
    return batches


def _rows_that_fit(tokens: npt.NDArray[np.int64], token_budget: int, sorted_: bool) -> int:
    """How many of the first rows fit into the budget; at least one."""
    if sorted_:  # the first is the longest
        return max(token_budget // max(int(tokens[0]), 1), 1)
    padded = np.maximum.accumulate(np.maximum(tokens, 1)) * np.arange(1, len(tokens) + 1)
    return max(int(np.searchsorted(padded, token_budget, side="right")), 1)
