"""Token ids of many rows: as flat arrays, and as the padded batches that models take, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rankmill.workers.batches.planner import Rows

Ids = npt.NDArray[np.int64]

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of a model's inputs, as in transformers."""

_MEMORY_SHARE = 4
"""A token of a shared prefix counts as one of this many computed ones: it takes memory, not time."""

_FEWEST_TOKENS = 256
"""Smaller pieces are not worth a stream: reading the weights takes as long as the products."""


@dataclass(frozen=True)
class Batch:
    """Padded model input: ``ids``, ``types`` and ``mask`` of shape ``[rows, longest]``.

    ``types`` (segment ids) is ``None`` for models without types. Rows of equal ``groups`` ``[rows]`` may
    share a prefix; ``None`` if nothing is known of that.
    """

    ids: Ids
    types: Ids | None
    mask: Ids
    groups: Ids | None = None

    def named(self) -> dict[str, Ids]:
        """The arrays, by the names in `INPUTS`."""
        types = np.zeros_like(self.ids) if self.types is None else self.types
        return dict(zip(INPUTS, (self.ids, self.mask, types), strict=True))


@dataclass(frozen=True)
class Tokens:
    """Token ids of `n` pairs, end to end; row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

    Where rows share a prefix, ``groups`` ``[n]`` is equal for them, and ``shared`` ``[n]`` is how many tokens
    that are; 0 for a row that shares nothing.
    """

    ids: Ids
    types: Ids | None
    offsets: Ids
    groups: Ids | None = None
    shared: Ids | None = None

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
            groups=_together([piece.groups for piece in pieces]),
            shared=_together([piece.shared for piece in pieces]),
        )

    @cached_property
    def lengths(self) -> Ids:
        """Tokens in each row, shape ``[n]``."""
        return np.diff(self.offsets)

    @cached_property
    def costs(self) -> Ids:
        """Tokens that each row adds to a batch in which rows that share a prefix are together, shape ``[n]``.

        A prefix is computed once for all; its keys and values still take memory in every row.
        """
        if self.shared is None:
            return self.lengths
        costs: Ids = np.maximum(self.lengths - self.shared, -(-self.lengths // _MEMORY_SHARE))
        return costs

    def take(self, rows: Rows) -> Tokens:
        """The given rows."""
        places = self.places(rows)
        return Tokens(
            ids=self.ids[places],
            types=None if self.types is None else self.types[places],
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[rows])]),
            groups=None if self.groups is None else self.groups[rows],
            shared=None if self.shared is None else self.shared[rows],
        )

    def places(self, rows: Rows) -> Ids:
        """Indices into ``ids`` of the tokens of the given rows, row after row."""
        return spans(self.offsets[rows], self.lengths[rows])


def in_a_row(rows: Sequence[list[int]]) -> Tokens:
    """Rows of token ids as `Tokens` without types."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    return Tokens(ids, None, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def sharing(tokens: Tokens, prefixes: Sequence[str]) -> Tokens:
    """The same rows; rows with equal `prefixes` share their first tokens."""
    shared = np.zeros_like(tokens.lengths)
    together: dict[str, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        together.setdefault(prefix, []).append(row)
    for members in together.values():
        if len(members) > 1:
            shared[members] = _alike(tokens, np.array(members))
    groups = np.fromiter(map(hash, prefixes), np.int64, len(prefixes))
    return replace(tokens, groups=groups, shared=shared)


def _alike(tokens: Tokens, rows: Rows) -> int:
    """How many tokens rows begin with in common; the last of each does not count."""
    most = max(int(tokens.lengths[rows].min()) - 1, 0)
    beginnings = tokens.ids[tokens.offsets[rows][:, None] + np.arange(most)]
    differ = (beginnings != beginnings[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else most


def _together(parts: Sequence[Ids | None]) -> Ids | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found and len(found) == len(parts) else None


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
    groups = _together([None if tokens.groups is None else tokens.groups[rows] for tokens, rows in parts])
    return Batch(ids, types, mask.astype(np.int64), groups)


class BatchPiece(NamedTuple):
    """Some rows of a batch, for a stream of a device: a batch of its own, as wide as its longest row."""

    rows: Rows
    batch: Batch


def rows_alone(batch: Batch) -> Iterator[Batch]:
    """Each row of a batch as a batch of its own, without padding."""
    for row, length in enumerate(batch.mask.sum(axis=1).tolist()):
        yield _part(batch, np.array([row]), length)


def cut_batch(batch: Batch, most: int) -> list[BatchPiece]:
    """Cut a batch into up to `most` pieces of about equal work, the longest rows first.

    Every row is in exactly one piece; a small batch is one piece. Groups are left out.

    >>> mask = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    >>> [piece.rows.tolist() for piece in cut_batch(Batch(mask, None, np.repeat(mask, 200, axis=1)), 2)]
    [[1], [2, 0]]
    """
    pieces = _pieces(batch.mask.sum(axis=1), most)
    if len(pieces) == 1:
        return [BatchPiece(np.arange(len(batch.mask)), batch)]
    longest = [int(batch.mask[rows[0]].sum()) for rows in pieces]
    return [BatchPiece(rows, _part(batch, rows, width)) for rows, width in zip(pieces, longest, strict=True)]


def padded_lengths(lengths: Ids, most: int) -> Ids:
    """The tokens that are computed for each row of a batch, shape ``[n]``, if it is cut as `cut_batch` does.

    >>> padded_lengths(np.array([200, 600, 400]), 1).tolist()
    [600, 600, 600]
    >>> padded_lengths(np.array([200, 600, 400]), 2).tolist()
    [400, 600, 400]
    """
    found = np.empty_like(lengths)
    for rows in _pieces(lengths, most):
        found[rows] = lengths[rows].max(initial=0)
    return found


def _pieces(lengths: Ids, most: int) -> list[Rows]:
    """The rows of each of up to `most` pieces of a batch, the longest first if there are several."""
    pieces = min(most, len(lengths), -(-int(lengths.sum()) // _FEWEST_TOKENS))
    if pieces <= 1:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    sizes = _even(lengths[order].tolist(), pieces)
    return np.split(order, np.cumsum(sizes)[:-1])


def _even(lengths: list[int], pieces: int) -> list[int]:
    """Rows of up to so many pieces, of which the heaviest has as few padded tokens as can be."""
    low, high = 1, len(lengths) * lengths[0]
    while low < high:
        middle = (low + high) // 2
        if len(_filled(lengths, middle)) <= pieces:
            high = middle
        else:
            low = middle + 1
    return _filled(lengths, high)


def _filled(lengths: list[int], tokens: int) -> list[int]:
    """Rows of pieces that are filled up to so many padded tokens, one after the other."""
    sizes, start = [], 0
    while start < len(lengths):
        sizes.append(min(max(tokens // lengths[start], 1), len(lengths) - start))
        start += sizes[-1]
    return sizes


def _part(batch: Batch, rows: Rows, longest: int) -> Batch:
    types = None if batch.types is None else batch.types[rows, :longest]
    return Batch(batch.ids[rows, :longest], types, batch.mask[rows, :longest])
