"""A run's usage: scored pairs and tokens, seconds of each device, and rows that needed no work or have no
score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import Field

from rankmill.jobs.contract.results import ChunkScores

Amount = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Most that can be counted: scripts in Redis count in 64-bit floating point, which is exact up to this."""


class Amounts(NamedTuple):
    """Scored pairs, their tokens, and microseconds of the device.

    ``cached`` counts rows that took the score of another row or a known score; ``failed`` counts rows without
    a score.
    """

    pairs: Amount = 0
    tokens: Amount = 0
    microseconds: Amount = 0
    cached: Amount = 0
    failed: Amount = 0

    def plus(self, other: Amounts) -> Amounts:
        """Add the amounts of both."""
        return Amounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Amounts()

NO_DEVICE = ""
"""Name of the device for rows without a score, and for rows that needed no work."""

Usage = Mapping[str, Amounts]
"""Amounts by the name of the device."""


def used_by(result: ChunkScores) -> dict[str, Amounts]:
    """The usage of a result."""
    stats = result.stats
    pairs = len(result.scores) - result.scores.null_count
    microseconds = round(1e6 * stats.device_seconds)
    return {stats.device_name: Amounts(pairs, stats.tokens, microseconds)}


def joined(one: Usage, other: Usage) -> dict[str, Amounts]:
    """Add the usage of both, device by device."""
    names = one.keys() | other.keys()
    return {name: one.get(name, NOTHING).plus(other.get(name, NOTHING)) for name in sorted(names)}
