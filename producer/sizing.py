"""How many chunks of a run are in Redis at a time, as the workers of its queue come and go."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from jobs.store.capacity import Capacity
from producer.splitting import Unit

MIN_CHUNKS = 32
"""Fewest chunks in the window with ``window: auto``."""

_AHEAD = 2
"""With ``window: auto`` the window is as many times what the workers claim ahead."""

_REFILL_SHARE = 4
"""Chunks are submitted when 1/4 of the window is free: several at once cost less."""


class WindowSize:
    """Most units of a run in Redis without a result: in number, and in bytes of payload.

    Parameters
    ----------
    chunks
        The setting ``window``. ``auto``: twice what the live workers claim ahead, at least `MIN_CHUNKS`.
    payload_bytes
        Most bytes of payload, whatever the workers claim.
    """

    def __init__(self, chunks: int | Literal["auto"], payload_bytes: int) -> None:
        self.follows_workers = chunks == "auto"
        self._chunks = MIN_CHUNKS if chunks == "auto" else chunks
        self._pairs = 0
        self._payload_bytes = payload_bytes

    def follow(self, capacity: Capacity, chunk_rows: int) -> None:
        """Take note of what the workers claim ahead; each may claim a chunk more, as it claims whole ones."""
        self._pairs = _AHEAD * (capacity.claim_ahead + capacity.workers * chunk_rows)

    def is_full(self, units: int, rows: int, payload: int) -> bool:
        """Whether no more units fit beside so many, with so many rows and bytes of payload."""
        return (units >= self._chunks and rows >= self._pairs) or payload >= self._payload_bytes

    def wants_more(self, units: Collection[Unit]) -> bool:
        """Whether so much of the window is free that it is time to submit more units."""
        rows = sum(len(unit.table) for unit in units)
        payload = sum(unit.payload_bytes for unit in units)
        free = max(self._chunks // _REFILL_SHARE, 1)
        few = len(units) <= self._chunks - free or rows < self._pairs * (1 - 1 / _REFILL_SHARE)
        return few and payload < self._payload_bytes
