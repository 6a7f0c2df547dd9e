"""Scores as callers get them, with the reasons of those that are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.wire import outputs


class Scores(npt.NDArray[np.float32]):
    """Scores of a run: float32 of shape ``[n]``, NaN for the rows in `errors`.

    With ``all_labels`` it is ``[n, labels]``. An array like any other; what is computed or cut from it is one
    without `errors` and `labels`.
    """

    errors: Mapping[int, str]
    """Reasons by row number (from 0) for the rows without a score."""
    labels: tuple[str, ...]
    """Names of the columns of ``[n, labels]``."""

    def __array_finalize__(self, _: object) -> None:
        self.errors, self.labels = {}, ()

    @classmethod
    def of(
        cls, parts: Sequence[npt.NDArray[np.float32]], errors: Mapping[int, str], labels: tuple[str, ...] = ()
    ) -> Scores:
        """The scores of a run's chunks, in order."""
        if labels:  # a chunk without any score does not know how many there are
            parts = [part if part.ndim > 1 else np.stack([part] * len(labels), 1) for part in parts]
        whole = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        found = whole.view(cls)
        found.errors, found.labels = dict(errors), labels
        return found


def as_array(scores: pa.Array) -> npt.NDArray[np.float32]:
    """Scores of rows as float32 ``[n]``, lists of them as ``[n, labels]``; NaN for null."""
    each = outputs(scores)
    if not each:
        plain: npt.NDArray[np.float32] = scores.to_numpy(zero_copy_only=False).astype(np.float32)
        return plain
    found = np.full((len(scores), each), np.nan, np.float32)
    known = scores.drop_null().flatten().to_numpy(zero_copy_only=False)
    found[scores.is_valid().to_numpy(zero_copy_only=False)] = known.reshape(-1, each)
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
    """Rank passages by their scores, best first; those without a score come last.

    Raises
    ------
    ConfigError
        They have several.
    """
    if scores.ndim > 1:
        raise ConfigError("all_labels: passages are ranked by one score; name its label instead")
    order = np.argsort(-np.asarray(scores), kind="stable")[:top_k].tolist()
    return [Ranked(index, float(scores[index]), scores.errors.get(index)) for index in order]


@dataclass
class RunStats:
    """How the rows that were read of a run so far were scored.

    ``retries`` counts attempts beyond a chunk's first; ``tokens`` are real ones, ``padded_tokens`` have the
    padding with them. ``workers`` has the rows of each worker, by name; ``seconds`` is the longest
    time that a worker had a chunk, from fetching it to its scores; ``tokenize_seconds`` and
    ``forward_seconds`` are parts of it (``None`` if they are not known: only requests ask for them).
    ``precision``, ``backend`` and ``revision`` are those of the last chunk with scores (``None`` if there is
    none, or no revision).
    """

    rows: int = 0
    chunks: int = 0
    retries: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    tokenize_seconds: float | None = None
    forward_seconds: float | None = None
    precision: str | None = None
    backend: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, parts: Sequence[RunStats]) -> RunStats:
        """Those of several runs together; what is of the last chunk is the last run's."""
        last = parts[-1] if parts else cls()
        slowest = max(parts, key=lambda part: part.seconds, default=last)
        workers: dict[str, int] = {}
        for part in parts:
            for worker, rows in part.workers.items():
                workers[worker] = workers.get(worker, 0) + rows
        return replace(
            last,
            rows=sum(part.rows for part in parts),
            chunks=sum(part.chunks for part in parts),
            retries=sum(part.retries for part in parts),
            tokens=sum(part.tokens for part in parts),
            padded_tokens=sum(part.padded_tokens for part in parts),
            seconds=slowest.seconds,
            tokenize_seconds=slowest.tokenize_seconds,
            forward_seconds=slowest.forward_seconds,
            workers=workers,
        )
