"""Whose turn it is: requests come first, and bulk work keeps a share; no I/O."""

from __future__ import annotations

REQUESTS_FOR_BULK = 3
"""Pairs of requests for each pair of bulk work, at most, while both wait: bulk work keeps a quarter."""


class Turns:
    """Takes turns between requests and bulk work, by pairs.

    A request is next unless requests have had more than their part since bulk work last had a turn.

    >>> turns = Turns()
    >>> turns.took("request", 20)
    >>> turns.bulk_is_next
    True
    >>> turns.took("bulk", 64)
    >>> turns.bulk_is_next
    False
    """

    def __init__(self) -> None:
        self._ahead = 0
        self._part = 0

    @property
    def bulk_is_next(self) -> bool:
        """Whether bulk work, if some waits, comes before the next request."""
        return self._ahead > 0

    def took(self, kind: str, pairs: int) -> None:
        """Count a turn of `kind` (``request`` or ``bulk``) with so many `pairs`.

        Neither is owed for more than the latest turn: however long one was alone, the other is soon next.
        """
        if kind == "request":
            self._ahead = min(self._ahead + pairs, max(self._part, pairs))
        else:
            self._part = REQUESTS_FOR_BULK * pairs
            self._ahead = max(self._ahead - self._part, -self._part)

    def no_bulk_waits(self) -> None:
        """Forget what requests have had: no bulk work waited for it."""
        self._ahead = min(self._ahead, 0)
