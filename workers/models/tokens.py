"""Token ids of many rows: as flat arrays, and as the padded batches that models take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from workers.engine.planner import Rows

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Padded model input: ``ids``, ``types`` and ``mask`` of shape ``[rows, longest]``.

    ``types`` (segment ids) is ``None`` for models without types.
    """

    ids: Ids
    types: Ids | None
    mask: Ids


@dataclass(frozen=True)
class Tokens:
    """Token ids of `n` pairs, end to end; row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Ids
    types: Ids | None
    offsets: Ids

    @classmethod
    def join(cls, pieces: Sequence[Tokens]) -> Tokens:
        """The rows of all pieces, in order."""
        if len(pieces) == 1:
            return pieces[0]
        none = np.zeros(0, dtype=np.int64)
        types = [piece.types for piece in pieces if piece.types is not None]
        lengths = np.concatenate([none, *(piece.lengths for piece in pieces)])
        return cls(
            ids=np.concatenate([none, *(piece.ids for piece in pieces)]),
            types=np.concatenate(types) if types else None,
            offsets=np.concatenate([none, [0], np.cumsum(lengths)]),
        )

    @cached_property
    def lengths(self) -> Ids:
        """Tokens in each row, shape ``[n]``."""
        return np.diff(self.offsets)

    def places(self, rows: Rows) -> Ids:
        """Indices into ``ids`` of the tokens of the given rows, row after row."""
        return spans(self.offsets[rows], self.lengths[rows])


def spans(starts: Ids, lengths: Ids) -> Ids:
    """The indices of spans of an array, one span after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(lengths.sum())


def pad(parts: Sequence[tuple[Tokens, Rows]], pad_id: int) -> Batch:
    """Rows of one or several `Tokens` as one batch, padded on the right."""
    lengths = np.concatenate([tokens.lengths[rows] for tokens, rows in parts])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    found = [(tokens, tokens.places(rows)) for tokens, rows in parts]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate([tokens.ids[places] for tokens, places in found])
    types = None
    if all(tokens.types is not None for tokens, _ in found):
        types = np.zeros(mask.shape, dtype=np.int64)
        types[mask] = np.concatenate([cast("Ids", tokens.types)[places] for tokens, places in found])
    return Batch(ids, types, mask.astype(np.int64))
