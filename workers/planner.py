"""Which rows to run together: lengths in, batches out. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]


def plan_batches(lengths: npt.ArrayLike, token_budget: int) -> list[Rows]:
    """Cut rows into batches of similar length, the longest first.

    Sorting keeps padding low; cutting by padded tokens (rows times the longest row) instead of
    by rows keeps every batch equally heavy; the longest first makes the first batch the one
    that needs the most memory.

    Parameters
    ----------
    lengths
        Tokens in each row, shape ``[n]``.
    token_budget
        Padded tokens in a batch, at most. A row longer than that is a batch of its own.

    Returns
    -------
    list of int arrays
        Row indices of each batch; every row is in exactly one.

    >>> [batch.tolist() for batch in plan_batches([3, 9, 4, 8], token_budget=18)]
    [[1, 3], [2, 0]]
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-tokens, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        longest = max(int(tokens[order[start]]), 1)
        rows = max(token_budget // longest, 1)
        batches.append(order[start : start + rows])
        start += rows
    return batches
