"""How large batches are, and how many are cut together: old chunks are finished first, little is padded."""

from __future__ import annotations

from collections import deque
from statistics import median

_SECONDS = 3.5
"""Chunks whose rows take about so long share batches. The oldest are finished first: what is lost when all
processes die at once, scored rows of unfinished chunks, is less than 5 s of work."""

BATCH_SECONDS = 0.5
"""Longest time of a batch: a request waits for it, and with fewer rows in each batch less is padded."""

_LEAST_TOKENS = 512
"""Fewest tokens in a batch of a slow model: fewer cost speed (7% with 384 tokens, PyTorch on a CPU)."""

_FIRST_SHARE = 4
"""The first batches have 1/4 of the budget's tokens: the model may be slow."""

_FEWEST = 4
"""Fewest batches that are cut together, and as many until it is known how long one takes: rows in fewer
batches are padded too much."""

_LATEST = 20
"""Batches whose time counts."""


class Mixing:
    """Follows the time that batches take.

    Parameters
    ----------
    short_batches
        Whether a batch of a slow model has fewer tokens than the budget.

    >>> mixing = Mixing(short_batches=True)
    >>> mixing.budget(2048), mixing.batches(512)
    (512, 4)
    >>> mixing.see(tokens=512, seconds=0.25)
    >>> mixing.budget(2048), mixing.batches(1024)
    (1024, 7)
    """

    def __init__(self, *, short_batches: bool) -> None:
        self._short_batches = short_batches
        self._speeds: deque[float] = deque(maxlen=_LATEST)

    def see(self, tokens: int, seconds: float) -> None:
        """Record a batch: its padded tokens, and its time."""
        self._speeds.append(tokens / max(seconds, 1e-6))

    def budget(self, most: int) -> int:
        """Padded tokens in a batch, at most `most`."""
        if not self._short_batches:
            return most
        if not self._speeds:
            return max(most // _FIRST_SHARE, 1)
        return min(most, max(round(BATCH_SECONDS * median(self._speeds)), _LEAST_TOKENS))

    def batches(self, budget: int) -> int:
        """How many batches of so many padded tokens are cut together."""
        if not self._speeds:
            return _FEWEST
        return max(round(_SECONDS * median(self._speeds) / budget), _FEWEST)
