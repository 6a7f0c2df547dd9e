"""Scores as callers get them, with the reasons of those that are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


class Scores(npt.NDArray[np.float32]):
    """Scores of a run: float32 of shape ``[n]``, NaN for the rows in `errors`.

    An array like any other; what is computed or cut from it is one without `errors`.
    """

    errors: Mapping[int, str]
    """Reasons by row number (from 0) for the rows without a score."""

    def __array_finalize__(self, _: object) -> None:
        self.errors = {}

    @classmethod
    def of(cls, parts: Sequence[npt.NDArray[np.float32]], errors: Mapping[int, str]) -> Scores:
        """The scores of a run's chunks, in order."""
        whole = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        found = whole.view(cls)
        found.errors = dict(errors)
        return found


@dataclass(frozen=True)
class Ranked:
    """A passage ranked by `Client.rank`: its index in the given list, and its score.

    ``error`` is the reason if there is no score, which is NaN then.
    """

    index: int
    score: float
    error: str | None = None


def ranked(scores: Scores, top_k: int | None) -> list[Ranked]:
    """Rank passages by their scores, best first; those without a score come last."""
    order = np.argsort(-np.asarray(scores), kind="stable")[:top_k].tolist()
    return [Ranked(index, float(scores[index]), scores.errors.get(index)) for index in order]


@dataclass
class RunStats:
    """How the rows that were read of a run so far were scored.

    ``retries`` counts attempts beyond a chunk's first; ``tokens`` are real ones, ``padded_tokens`` have the
    padding with them. ``workers`` has the rows of each worker, by name. ``precision``, ``backend`` and
    ``revision`` are those of the last chunk with scores (``None`` if there is none, or no revision).
    """

    rows: int = 0
    chunks: int = 0
    retries: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    precision: str | None = None
    backend: str | None = None
    revision: str | None = None
