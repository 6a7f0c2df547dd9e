"""How many batches are cut together, so that the oldest chunks are finished first and little is padded."""

from __future__ import annotations

from collections import deque
from statistics import median

_SECONDS = 3.5
"""Chunks whose rows take about so long share batches. The oldest are finished first: what is lost when all
processes die at once, scored rows of unfinished chunks, is less than 5 s of work."""

_FEWEST = 4
"""Fewest batches that are cut together, and as many until it is known how long one takes: rows in fewer
batches are padded too much."""

_LATEST = 20
"""Batches whose time counts."""


class Mixing:
    """Follows the time that batches take."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LATEST)

    def see(self, seconds: float) -> None:
        """Record the time of a batch."""
        self._seconds.append(seconds)

    @property
    def batches(self) -> int:
        """Batches that are cut together."""
        if not self._seconds:
            return _FEWEST
        return max(round(_SECONDS / max(median(self._seconds), 1e-6)), _FEWEST)
