"""The rows of all claimed chunks that wait to be scored, cut into batches together; no I/O."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from workers.engine.planner import Rows, plan_batches

Work = TypeVar("Work")

_Batch = npt.NDArray[np.int64]
"""Shape ``[3, rows]``; for each row the number of its work, its index in that work, its length in tokens."""

_NUMBER, _LENGTH = 0, 2


class WaitingRows(Generic[Work]):
    """Rows of several pieces of work, cut into batches together.

    Small requests share batches, and rows are batched with others of similar length. The next batch
    always contains rows of the oldest work, so no row waits forever.

    >>> waiting = WaitingRows[str]()
    >>> waiting.add("old", [3, 9], token_budget=12)
    >>> waiting.add("new", [8, 3], token_budget=12)
    >>> [[(work, rows.tolist()) for work, rows in waiting.take()] for _ in range(3)]
    [[('old', [1])], [('old', [0]), ('new', [1])], [('new', [0])]]
    """

    def __init__(self) -> None:
        self._works: dict[int, Work] = {}
        self._left: Counter[int] = Counter()
        self._batches: deque[_Batch] = deque()
        self._next = 0

    @property
    def batches(self) -> int:
        """How many batches wait."""
        return len(self._batches)

    def add(
        self,
        work: Work,
        lengths: npt.ArrayLike,
        token_budget: int,
        *,
        max_batch: int | None = None,
        length_aware: bool = True,
    ) -> None:
        """Add the rows of `work`, with their lengths in tokens, and cut all waiting rows into batches."""
        count = np.size(lengths)
        if not count:
            return
        number, self._next = self._next, self._next + 1
        self._works[number], self._left[number] = work, count
        new = np.stack([np.full(count, number), np.arange(count), np.asarray(lengths, dtype=np.int64)])
        waiting = np.concatenate([*self._batches, new], axis=1)
        plan = plan_batches(waiting[_LENGTH], token_budget, max_batch=max_batch, length_aware=length_aware)
        batches = [waiting[:, batch] for batch in plan]
        self._batches = deque(sorted(batches, key=lambda batch: int(batch[_NUMBER].min())))

    def take(self) -> list[tuple[Work, Rows]]:
        """Take the next batch, as the rows of each work in it; there must be one."""
        numbers, rows, _ = self._batches.popleft()
        parts = []
        for number in np.unique(numbers).tolist():
            mine = rows[numbers == number]
            parts.append((self._works[number], mine))
            self._left[number] -= len(mine)
            if not self._left[number]:
                del self._works[number], self._left[number]
        return parts

    def remove(self, work: Work) -> int:
        """Remove the waiting rows of `work`; returns how many there were."""
        number = next((number for number, waiting in self._works.items() if waiting is work), None)
        if number is None:
            return 0
        others = (batch[:, batch[_NUMBER] != number] for batch in self._batches)
        self._batches = deque(batch for batch in others if batch.size)
        del self._works[number]
        return self._left.pop(number)
