"""Cuts the waiting rows of chunks into batches of similar length.

The rows that belong together, such as those of a chunk, are called a work.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]

Owner = TypeVar("Owner")

_Batch = npt.NDArray[np.int64]
"""An array ``[4, rows]``. It has for each row: the number of the row's work (such as a chunk), its index in
the work, its length in tokens, and the number of its group (rows that share a prefix).
"""

_NUMBER, _LENGTH, _GROUP = 0, 2, 3

_CUT_AHEAD = 6
"""If works (such as chunks) are cut into batches one by one, the next work is cut as soon as fewer than this
many batches are left.
"""


def plan_batches(
    lengths: npt.ArrayLike,
    token_budget: int,
    *,
    max_batch: int | None = None,
    length_aware: bool = True,
    groups: npt.ArrayLike | None = None,
    packed: bool = False,
) -> list[Rows]:
    """Cut rows into batches of similar length, the longest first.

    Sorting keeps padding low. Cutting by padded tokens (rows times the longest row) keeps all batches about
    equally heavy. With the longest rows first, the first batch needs the most memory. With `groups`, rows
    come group after group instead.

    Parameters
    ----------
    lengths
        Tokens in each row, shape ``[n]``.
    token_budget
        A batch has at most this many padded tokens; a longer row becomes a batch of its own.
    max_batch
        A batch has at most this many rows.
    length_aware
        Whether to sort by length. Unsorted rows keep their order, `groups` are ignored, and batches have more
        padding. Sorting is switched off only to measure what sorting gains.
    groups
        A number for each row, shape ``[n]``. Rows with equal numbers share a prefix and follow each other,
        the longest first; rows with number 0 share nothing.
    packed
        Whether batches have no padding, so that the budget counts only the rows' own tokens.

    Returns
    -------
    list of int arrays
        The indices of each batch's rows; every row is in exactly one batch.

    >>> [batch.tolist() for batch in plan_batches([3, 9, 4, 8], token_budget=18)]
    [[1, 3], [2, 0]]
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    order = np.arange(len(tokens))
    if length_aware:
        order = np.lexsort([-tokens, np.zeros_like(tokens) if groups is None else np.asarray(groups)])
    least = np.maximum(tokens[order], 1)
    total = np.cumsum(least)
    batches = []
    start = 0
    while start < len(order):
        if packed:
            end = int(np.searchsorted(total, total[start] - least[start] + token_budget, side="right"))
        else:
            following = least[start : start + token_budget // int(least[start])]
            padded = np.maximum.accumulate(following) * np.arange(1, len(following) + 1)
            end = start + int(np.searchsorted(padded, token_budget, side="right"))
        end = min(max(end, start + 1), start + (max_batch or len(order)))
        batches.append(order[start:end])
        start = end
    return batches


class WaitingRows(Generic[Owner]):
    """Holds the rows of several chunks that wait to be scored, and cuts them into batches together.

    Small requests share batches, and a batch has rows of similar length. The next batch always contains rows
    of the oldest chunk, so no row waits forever.

    >>> waiting = WaitingRows[str]()
    >>> waiting.add("old", [3, 9], token_budget=12)
    >>> waiting.add("new", [8, 3], token_budget=12)
    >>> [[(work, rows.tolist()) for work, rows in waiting.take()] for _ in range(3)]
    [[('old', [1])], [('old', [0]), ('new', [1])], [('new', [0])]]
    """

    def __init__(self) -> None:
        self._ahead = sys.maxsize
        self._mixed_tokens = 0
        self._tokens: dict[int, int] = {}
        self._together = 0
        self._behind: deque[_Batch] = deque()
        self._cut: Callable[..., list[Rows]] = plan_batches
        self._works: dict[int, Owner] = {}
        self._size: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._batches: deque[_Batch] = deque()
        self._next = 0

    @property
    def batches(self) -> int:
        """The number of waiting batches; a work that is not cut yet counts as one."""
        return len(self._batches) + len(self._behind)

    def add(
        self,
        work: Owner,
        lengths: npt.ArrayLike,
        token_budget: int,
        *,
        max_batch: int | None = None,
        length_aware: bool = True,
        mixed_batches: int | None = None,
        whole: bool = False,
        groups: npt.ArrayLike | None = None,
        packed: bool = False,
    ) -> None:
        """Add the rows of a chunk. When rows are cut into batches, the limits of the latest call hold for the
        rows of all calls.

        Parameters
        ----------
        work
            What the rows belong to, such as the `Work` of a chunk.
        lengths
            Tokens of each row.
        token_budget, max_batch, length_aware, groups, packed
            How to cut batches, see `plan_batches`.
        mixed_batches
            Several works are cut into batches together only up to this many times `token_budget` tokens.
            Beyond that, the next work waits until fewer than two batches are left, so that the oldest works
            end sooner. By default, all works are cut together.
        whole
            Whether to cut works one by one, so that a work can be removed until one of its rows is taken.
        """
        count = np.size(lengths)
        if not count:
            return
        number, self._next = self._next, self._next + 1
        self._works[number], self._left[number], self._size[number] = work, count, count
        self._tokens[number] = int(np.sum(lengths))
        self._ahead = _CUT_AHEAD if whole else sys.maxsize if mixed_batches is None else 2
        self._mixed_tokens = 0 if whole or mixed_batches is None else mixed_batches * token_budget
        self._cut = partial(
            plan_batches,
            token_budget=token_budget, max_batch=max_batch, length_aware=length_aware, packed=packed,
        )  # fmt: skip
        group = np.zeros(count, np.int64) if groups is None else np.asarray(groups, dtype=np.int64)
        rows = [np.full(count, number), np.arange(count), np.asarray(lengths, dtype=np.int64), group]
        self._behind.append(np.stack(rows))
        self._cut_next()

    def take(self) -> list[tuple[Owner, Rows]]:
        """Remove the next batch and return it: each owner of rows, with the indices of its rows in the batch.

        There must be a batch.
        """
        numbers, rows, *_ = self._batches.popleft()
        parts = []
        for number in np.unique(numbers).tolist():
            mine = rows[numbers == number]
            parts.append((self._works[number], mine))
            self._left[number] -= len(mine)
            if not self._left[number]:
                del self._works[number], self._left[number], self._size[number], self._tokens[number]
        self._cut_next()
        return parts

    def take_all(self) -> Iterator[list[tuple[Owner, Rows]]]:
        """Remove all batches one after the other, and yield each."""
        while self.batches:
            yield self.take()

    def _cut_next(self) -> None:
        """Cut waiting works into batches, the oldest first, up to the limit for works that are cut together
        (`mixed_batches`). If few batches are left, cut at least the oldest work.
        """
        while self._behind:
            few = len(self._batches) < self._ahead
            if few:
                self._together = sum(int(rows[_LENGTH].sum()) for rows in self._batches)
            fresh: list[_Batch] = []
            while self._behind and (
                (few and not fresh) or self._together + self._next_tokens <= self._mixed_tokens
            ):
                self._together += self._next_tokens
                fresh.append(self._behind.popleft())
            if not fresh:
                return
            waiting = np.concatenate([*self._batches, *fresh], axis=1)
            groups = waiting[_GROUP] if waiting[_GROUP].any() else None
            cut = [waiting[:, batch] for batch in self._cut(waiting[_LENGTH], groups=groups)]
            self._batches = deque(sorted(cut, key=lambda batch: int(batch[_NUMBER].min())))  # oldest first

    @property
    def _next_tokens(self) -> int:
        """Number of tokens of the oldest work that is not cut into batches yet."""
        return self._tokens[int(self._behind[0][_NUMBER, 0])]

    def whole(self) -> list[Owner]:
        """Return the works (rows that belong together) of which no row was taken yet, the oldest first."""
        return [work for number, work in self._works.items() if self._left[number] == self._size[number]]

    def remove(self, work: Owner) -> int:
        """Remove the rows of `work` that still wait, and return their number."""
        number = next((number for number, waiting in self._works.items() if waiting is work), None)
        if number is None:
            return 0
        for some in (self._batches, self._behind):
            others = [batch[:, batch[_NUMBER] != number] for batch in some]
            some.clear()
            some.extend(batch for batch in others if batch.size)
        self._cut_next()
        del self._works[number], self._size[number], self._tokens[number]
        return self._left.pop(number)
