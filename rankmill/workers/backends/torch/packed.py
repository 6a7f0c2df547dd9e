"""Packs the rows of a batch into one buffer, end to end without padding, and unpacks it on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rankmill.workers.backends.torch.prefixes import SharedPrefixes, last_places
from rankmill.workers.backends.varlen import PackedInput
from rankmill.workers.batches.tokens import Ids, TokenIds, Tokens, ends, spans

Buffer = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PackedShape:
    """The sizes of the parts of a `Buffer`, which holds the rows of a batch end to end.

    ``keys`` is ``None`` if each row attends only to its own tokens. The sizes may be larger than a batch
    needs; nothing reads beyond the batch's tokens and rows.
    """

    tokens: int
    rows: int
    scores: int
    longest: int
    longest_keys: int
    types: bool
    keys: int | None = None

    def taken_apart(self, buffer: Tensor) -> PackedInput:
        """Split a buffer of int32 ``[numbers]`` into its parts, on the device that has the buffer."""
        sizes = [self.tokens, self.tokens, self.tokens * self.types, self.rows + 1, self.scores]
        sizes += [] if self.keys is None else [self.rows + 1, self.keys]
        ids, positions, types, starts, read, *keys = torch.split(buffer, sizes)
        return PackedInput(
            ids=ids.long()[None],
            positions=positions.long()[None],
            types=types.long()[None] if self.types else None,
            starts=starts,
            key_starts=keys[0] if keys else starts,
            keys=keys[1].long() if keys else None,
            read=read.long(),
            longest=self.longest,
            longest_keys=self.longest_keys,
        )


@dataclass(frozen=True)
class PackedRows:
    """The rows of a batch end to end, without padding.

    Attributes
    ----------
    ids, positions, types
        Id, position and segment id of each token, ``[tokens]``.
    lengths
        Number of tokens of each row, ``[rows]``.
    read
        Index of the token that each score reads, ``[scores]``.
    keys, key_lengths
        Indices of the tokens to which each row attends, row after row, and the number of these tokens for
        each row. ``None`` if each row attends only to its own tokens.
    """

    ids: Ids | TokenIds
    positions: Ids | TokenIds
    types: Ids | TokenIds | None
    lengths: Ids
    read: Ids
    keys: Ids | None = None
    key_lengths: Ids | None = None

    @classmethod
    def of(cls, rows: Tokens, read: Ids | None, first_position: int) -> PackedRows:
        """Join the rows of a batch end to end.

        Parameters
        ----------
        rows
            The batch's rows.
        read
            Index of the token that each score reads; ``None`` means the first token of each row.
        first_position
            Position of a row's first token. In RoBERTa and similar families, it is not 0. They give padding
            tokens the position `first_position` - 1, and do not count them in the positions of other tokens.
        """
        return cls(
            ids=rows.ids,
            positions=_positions(rows, first_position),
            types=rows.types,
            lengths=rows.lengths,
            read=rows.offsets[:-1] if read is None else read,
        )

    @classmethod
    def sharing(cls, shared: SharedPrefixes, skipped: int | None) -> PackedRows:
        """Join prefixes and rows end to end: first each shared prefix once, then the rest of each row."""
        before, after = shared.mask.astype(bool), shared.rest_mask.astype(bool)
        prefixes, rests = before.sum(axis=1), after.sum(axis=1)
        starts = np.cumsum(prefixes) - prefixes
        rest_starts = prefixes.sum() + np.cumsum(rests) - rests
        own = np.stack([starts[shared.of], rest_starts]).T.ravel()
        many = np.stack([prefixes[shared.of], rests]).T.ravel()
        return cls(
            ids=np.concatenate([shared.ids[before], shared.rest[after]]),
            positions=np.concatenate([np.nonzero(before)[1], shared.places[after]]),
            types=None,
            lengths=np.concatenate([prefixes, rests]),
            read=rest_starts + last_places(shared.rest, shared.rest_mask, skipped),
            keys=np.concatenate([np.arange(prefixes.sum()), spans(own, many)]),
            key_lengths=np.concatenate([prefixes, prefixes[shared.of] + rests]),
        )

    @property
    def shape(self) -> PackedShape:
        longest = int(self.lengths.max())
        return PackedShape(
            tokens=len(self.ids),
            rows=len(self.lengths),
            scores=len(self.read),
            longest=longest,
            longest_keys=longest if self.key_lengths is None else int(self.key_lengths.max()),
            types=self.types is not None,
            keys=None if self.keys is None else len(self.keys),
        )

    def filled(self, shape: PackedShape) -> Buffer:
        """Copy all arrays of these rows into one buffer, and fill the rest if `shape` is larger than the
        rows.
        """
        parts = [(self.ids, shape.tokens), (self.positions, shape.tokens)]
        parts += [] if self.types is None else [(self.types, shape.tokens)]
        parts += [(ends(self.lengths), shape.rows + 1), (self.read, shape.scores)]
        if self.keys is not None and self.key_lengths is not None and shape.keys is not None:
            parts += [(ends(self.key_lengths), shape.rows + 1), (self.keys, shape.keys)]
        buffer = np.empty(sum(size for _, size in parts), dtype=np.int32)
        done = 0
        for numbers, size in parts:
            buffer[done : done + len(numbers)] = numbers
            buffer[done + len(numbers) : done + size] = numbers[-1]  # rows that start where they end: empty
            done += size
        return buffer


def last_tokens(rows: Tokens, skipped: int | None) -> Ids:
    """Return, for each row, the index of its last token whose id is not `skipped`, or else of its first
    token.

    The rows lie end to end, and the indices count from the first token of all rows.
    """
    places = np.arange(len(rows.ids))
    if skipped is not None:
        places = np.where(rows.ids == skipped, 0, places)
    last: Ids = np.maximum(np.maximum.reduceat(places, rows.offsets[:-1]), rows.offsets[:-1])
    return last


def _positions(rows: Tokens, first: int) -> Ids | TokenIds:
    if first == 0:  # the same as below, but much faster
        starts = rows.offsets[:-1].astype(np.int32)
        return np.arange(len(rows.ids), dtype=np.int32) - np.repeat(starts, rows.lengths)
    counted = rows.ids != first - 1
    before = ends(counted)[rows.offsets[:-1]]
    positions: Ids = (np.cumsum(counted) - np.repeat(before, rows.lengths)) * counted + first - 1
    return positions
