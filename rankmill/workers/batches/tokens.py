"""Holds the token ids of many rows end to end, and makes batches from them, which can be cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.workers.batches.planner import Rows

Ids = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.integer[Any]]
"""Ids or types of tokens, as integers of any width; tokenizers give int32."""

INPUTS = ("input_ids", "attention_mask", "token_type_ids")

_MEMORY_SHARE = 4
"""In the cost of a batch, a row with a shared prefix counts as at least a quarter of its tokens. The prefix
is computed only once, but takes memory in every row.
"""

_FEWEST_TOKENS = 256
"""A batch is cut into at most one piece per this many tokens; with 256, a batch of 1,000 tokens makes at most
4 pieces. In smaller pieces, reading the model's weights would take as long as computing.
"""


@dataclass(frozen=True)
class Tokens:
    """Token ids of `n` pairs, end to end; row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

    ``types`` (segment ids) is ``None`` for models without types. Rows that share a prefix have equal numbers
    in ``groups``, shape ``[n]``; ``shared``, shape ``[n]``, is the number of tokens that each row shares, or
    0.
    """

    ids: TokenIds
    types: TokenIds | None
    offsets: Ids
    groups: Ids | None = None
    shared: Ids | None = None

    @classmethod
    def join(cls, pieces: Sequence[Tokens]) -> Tokens:
        if len(pieces) == 1:
            return pieces[0]
        none, types = np.zeros(0, np.int32), [piece.types for piece in pieces if piece.types is not None]
        lengths = np.concatenate([np.zeros(0, np.int64), *(piece.lengths for piece in pieces)])
        return cls(
            ids=np.concatenate([none, *(piece.ids for piece in pieces)]),
            types=np.concatenate(types) if types else None,
            offsets=ends(lengths),
            groups=_together([piece.groups for piece in pieces]),
            shared=_together([piece.shared for piece in pieces]),
        )

    @cached_property
    def lengths(self) -> Ids:
        return np.diff(self.offsets)

    @cached_property
    def costs(self) -> Ids:
        """The cost of each row in a batch, in tokens, ``[n]``. A prefix that the row shares with other rows
        does not count. But at least a quarter of the row's tokens count (`_MEMORY_SHARE`).
        """
        if self.shared is None:
            return self.lengths
        costs: Ids = np.maximum(self.lengths - self.shared, -(-self.lengths // _MEMORY_SHARE))
        return costs

    def take(self, rows: Rows) -> Tokens:
        starts, lengths = self.offsets[rows], self.lengths[rows]
        return Tokens(
            ids=pieces_of(self.ids, starts, lengths),
            types=None if self.types is None else pieces_of(self.types, starts, lengths),
            offsets=ends(lengths),
            groups=None if self.groups is None else self.groups[rows],
            shared=None if self.shared is None else self.shared[rows],
        )


@dataclass(frozen=True)
class Batch:
    """Rows of tokens that a model scores together.

    A backend reads the rows end to end (``rows``), or as arrays ``ids``, ``types`` and ``mask`` of shape
    ``[rows, longest]``, padded on the right. The arrays are made when they are first read. Rows with equal
    ``groups`` ``[rows]`` may share a prefix; ``None`` means that this is unknown.
    """

    rows: Tokens
    pad_id: int = 0

    @classmethod
    def padded(cls, ids: Ids, types: Ids | None, mask: Ids, groups: Ids | None = None) -> Batch:
        """Make a batch of arrays that are already padded on the right."""
        real = mask.astype(bool)
        flat_types = None if types is None else types[real].astype(np.int32)
        rows = Tokens(ids[real].astype(np.int32), flat_types, ends(mask.sum(axis=1)), groups)
        return cls(rows, int(ids[~real][0]) if not real.all() else 0)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the number of tokens of the longest row."""
        return len(self.rows.lengths), int(self.rows.lengths.max(initial=0))

    @property
    def groups(self) -> Ids | None:
        return self.rows.groups

    @cached_property
    def ids(self) -> Ids:
        return self._padded(self.rows.ids, self.pad_id)

    @cached_property
    def types(self) -> Ids | None:
        return None if self.rows.types is None else self._padded(self.rows.types, 0)

    @cached_property
    def mask(self) -> Ids:
        """Array ``[rows, longest]`` with 1 for each token and 0 for padding."""
        return self._is_real.astype(np.int64)

    def named(self) -> dict[str, Ids]:
        types = np.zeros_like(self.ids) if self.types is None else self.types
        return dict(zip(INPUTS, (self.ids, self.mask, types), strict=True))

    @cached_property
    def _is_real(self) -> npt.NDArray[np.bool_]:
        rows, longest = self.shape
        return np.broadcast_to(np.arange(longest), (rows, longest)) < self.rows.lengths[:, None]

    def _padded(self, numbers: TokenIds, padding: int) -> Ids:
        filled = np.full(self.shape, padding, dtype=np.int64)
        filled[self._is_real] = numbers
        return filled


def in_a_row(rows: Sequence[list[int]]) -> Tokens:
    """Join rows of token ids end to end to `Tokens` without segment ids."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
    return Tokens(ids, None, ends(lengths))


def sharing(tokens: Tokens, prefixes: Sequence[str]) -> Tokens:
    """Add ``groups`` and ``shared`` to `tokens`: which rows share a prefix, and how many tokens they share.

    Rows with equal texts in `prefixes` are a group, and share the tokens with which all of them begin.
    """
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
    """Return with how many equal tokens all `rows` begin, not counting any row's last token."""
    most = max(int(tokens.lengths[rows].min()) - 1, 0)
    beginnings = tokens.ids[tokens.offsets[rows][:, None] + np.arange(most)]
    differ = (beginnings != beginnings[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else most


def _together(parts: Sequence[Ids | None]) -> Ids | None:
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays and len(arrays) == len(parts) else None


def ends(lengths: Ids) -> Ids:
    """Return the offsets of pieces that lie end to end: lengths ``[3, 2]`` give ``[0, 3, 5]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def pieces_of(numbers: TokenIds, starts: Ids, lengths: Ids) -> TokenIds:
    """Copy pieces of an array into a new one; piece ``i`` is ``numbers[starts[i] : starts[i] + lengths[i]]``.

    Arrow copies each piece as one block, which is several times as fast as numpy's indexing. For this, Arrow
    is told that each piece is one binary value, and so is each gap between two pieces.
    """
    bounds = np.stack([starts, starts + lengths], axis=1).ravel()
    offsets = np.concatenate([[0], bounds, [len(numbers)]]) * numbers.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(numbers)]
    texts = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    taken = texts.take(pa.array(np.arange(1, len(bounds), 2)))
    picked: TokenIds = np.frombuffer(taken.buffers()[2], numbers.dtype)
    return picked


def spans(starts: Ids, lengths: Ids) -> Ids:
    """Return the indices in several spans: starts ``[2, 9]``, lengths ``[3, 1]`` give ``[2, 3, 4, 9]``."""
    last = np.cumsum(lengths)
    return np.repeat(starts - last + lengths, lengths) + np.arange(lengths.sum())


def put_together(parts: Sequence[tuple[Tokens, Rows]], pad_id: int) -> Batch:
    """Make one batch from rows of one or several `Tokens`."""
    return Batch(Tokens.join([tokens.take(rows) for tokens, rows in parts]), pad_id)


class BatchPiece(NamedTuple):
    """A piece of a batch: some rows, which one stream of a device computes as a separate batch."""

    rows: Rows
    batch: Batch


def rows_alone(batch: Batch) -> Iterator[Batch]:
    """Yield each row of a batch as a batch of its own, without padding."""
    for row in range(len(batch.rows.lengths)):
        yield _part(batch, np.array([row]))


def cut_batch(batch: Batch, most: int) -> list[BatchPiece]:
    """Cut a batch into up to `most` pieces of about equal work, the longest rows first.

    Every row is in exactly one piece; a small batch is one piece. If the batch is cut, its pieces have no
    ``groups``.

    >>> mask = np.repeat([[1, 0, 0], [1, 1, 1], [1, 1, 0]], 200, axis=1)
    >>> [piece.rows.tolist() for piece in cut_batch(Batch.padded(mask, None, mask), 2)]
    [[1], [2, 0]]
    """
    pieces = _pieces(batch.rows.lengths, most)
    if len(pieces) == 1:
        return [BatchPiece(np.arange(len(batch.rows.lengths)), batch)]
    return [BatchPiece(rows, _part(batch, rows)) for rows in pieces]


def padded_lengths(lengths: Ids, most: int) -> Ids:
    """Return the length of each row with its padding, ``[n]``, if `cut_batch` cuts the batch into up to
    `most` pieces.

    >>> padded_lengths(np.array([200, 600, 400]), 1).tolist()
    [600, 600, 600]
    >>> padded_lengths(np.array([200, 600, 400]), 2).tolist()
    [400, 600, 400]
    """
    padded = np.empty_like(lengths)
    for rows in _pieces(lengths, most):
        padded[rows] = lengths[rows].max(initial=0)
    return padded


def _pieces(lengths: Ids, most: int) -> list[Rows]:
    """Return the indices of the rows in each of up to `most` pieces of a batch, the longest rows first."""
    pieces = min(most, len(lengths), -(-int(lengths.sum()) // _FEWEST_TOKENS))
    if pieces <= 1:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    sizes = _even(lengths[order].tolist(), pieces)
    return np.split(order, np.cumsum(sizes)[:-1])


def _even(lengths: list[int], pieces: int) -> list[int]:
    """Return how many rows each of up to `pieces` pieces of a batch gets, so that all have about equal work.

    `lengths` begin with the longest row.
    """
    low, high = 1, len(lengths) * lengths[0]
    while low < high:
        middle = (low + high) // 2
        if len(_filled(lengths, middle)) <= pieces:
            high = middle
        else:
            low = middle + 1
    return _filled(lengths, high)


def _filled(lengths: list[int], tokens: int) -> list[int]:
    """Return how many rows each piece of a batch gets if a piece may have `tokens` padded tokens.

    `lengths` begin with the longest row.
    """
    sizes, start = [], 0
    while start < len(lengths):
        sizes.append(min(max(tokens // lengths[start], 1), len(lengths) - start))
        start += sizes[-1]
    return sizes


def _part(batch: Batch, rows: Rows) -> Batch:
    return Batch(replace(batch.rows.take(rows), groups=None), batch.pad_id)
