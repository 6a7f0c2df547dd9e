"""Finds rows of a batch that begin alike, so that their prefix is computed only once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rankmill.workers.batches.tokens import Batch, Ids

_GAIN = 1.2
"""Common prefixes are computed only once if the batch would otherwise have at least this many times as many
tokens.

Sharing has a cost, because keys and values are copied.
"""


class SharedPrefixes(NamedTuple):
    """A batch that is cut into the prefixes that several rows share, and the rest of each row.

    Attributes
    ----------
    ids, mask
        The prefixes, ``[prefixes, tokens]``, padded on the right.
    of
        Index of each row's prefix, ``[rows]``.
    rest, rest_mask
        The rest of each row, which is at least one token, ``[rows, tokens]``, padded on the right.
    places
        The position of each token of ``rest``.
    """

    ids: Ids
    mask: Ids
    of: Ids
    rest: Ids
    rest_mask: Ids
    places: Ids


def find_shared_prefixes(batch: Batch, skipped: int | None) -> SharedPrefixes | None:
    """Find the tokens with which several rows of a batch begin (shared prefixes).

    Returns ``None`` if computing them only once would not save enough.

    Parameters
    ----------
    batch
        The batch; rows with equal `Batch.groups` may begin alike.
    skipped
        The score reads a row's last token, but skips tokens with this id. The token that the score reads is
        never part of a prefix.
    """
    if batch.groups is None or batch.shape[0] < 2:
        return None
    lengths = batch.mask.sum(axis=1)
    _, first, of = np.unique(batch.groups, return_index=True, return_inverse=True)
    alike = (batch.ids == batch.ids[first[of]]).cumprod(axis=1).sum(axis=1)
    alike = np.minimum(alike, last_places(batch.ids, batch.mask, skipped))
    shared = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(shared, of, alike)
    several = np.bincount(of) > 1
    if not several.any():
        return None
    shared = np.where(several, shared, np.minimum(shared, shared[several].max()))
    rests = lengths - shared[of]
    width, rest_width = int(shared.max()), int(rests.max())
    if not width or len(first) * width + rests.size * rest_width > batch.ids.size / _GAIN:
        return None
    mask = np.arange(width) < shared[:, None]
    places = shared[of][:, None] + np.arange(rest_width)
    rest_mask = np.arange(rest_width) < rests[:, None]
    inside = np.minimum(places, batch.ids.shape[1] - 1)
    rest = np.where(rest_mask, np.take_along_axis(batch.ids, inside, axis=1), batch.ids[0, 0])
    ids = np.where(mask, batch.ids[first, :width], batch.ids[0, 0])
    return SharedPrefixes(
        ids, mask.astype(np.int64), of.astype(np.int64), rest, rest_mask.astype(np.int64), places
    )


def last_places(ids: Ids, mask: Ids, skipped: int | None) -> Ids:
    """Return, for each padded row, the index of its last token whose id is not `skipped`, or else 0."""
    real = mask if skipped is None else mask * (ids != skipped)
    places: Ids = (real * np.arange(ids.shape[1])).argmax(axis=1)
    return places
