"""A run's usage: scored pairs and tokens, seconds by device, rows without either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field

from rankmill.jobs.contract.results import ChunkScores

Amount = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Scripts in the server count with numbers of 64-bit floating point, exact up to this."""


class Amounts(NamedTuple):
    """Scored pairs, their tokens and the device's microseconds; rows that took another's or a known score
    (``cached``); rows without a score (``failed``).
    """

    pairs: Amount = 0
    tokens: Amount = 0
    microseconds: Amount = 0
    cached: Amount = 0
    failed: Amount = 0

    def plus(self, other: Amounts) -> Amounts:
        """The sums."""
        return Amounts(*(mine + its for mine, its in zip(self, other, strict=True)))


NOTHING = Amounts()

NO_DEVICE = ""
"""Device of rows without a score, and of rows that needed no work: none."""

Usage = Mapping[str, Amounts]
"""Amounts by the name of the device."""


def used_by(result: ChunkScores) -> dict[str, Amounts]:
    """The cost of a result."""
    stats = result.stats
    pairs = len(result.scores) - result.scores.null_count
    microseconds = round(1e6 * stats.device_seconds)
    return {stats.device_name: Amounts(pairs, stats.tokens, microseconds)}


def joined(one: Usage, other: Usage) -> dict[str, Amounts]:
    """The sums of both."""
    names = one.keys() | other.keys()
    return {name: one.get(name, NOTHING).plus(other.get(name, NOTHING)) for name in sorted(names)}
