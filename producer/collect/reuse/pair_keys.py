"""Keys by which repeated pairs are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Keys = npt.NDArray[np.uint64]

_WORD = 8
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=4, dtype=np.uint64) | np.uint64(1)
_OF_QUERY, _OF_LENGTH, _OF_FIRST, _OF_LAST = _FACTORS
"""Odd numbers of 64 bits, by which the parts of a key are multiplied."""


def pair_keys(table: pa.Table, columns: tuple[str, str]) -> Keys:
    """A multiple of four for each row's pair: equal pairs have equal numbers.

    It is made of the lengths of the texts and of their first and last eight bytes, which is several times as
    quick as a hash of all. So pairs of texts that differ only elsewhere have the same number.
    """
    return _joined(*(_of_places(as_bytes(table[name])) for name in columns))


def whole_keys(table: pa.Table, columns: tuple[str, str]) -> Keys:
    """As `pair_keys`, but of the whole texts, and other numbers; they hold in this process only."""
    return _joined(*(_hashes(as_bytes(table[name])) for name in columns)) + np.uint64(1)


def unlike_keys() -> Iterator[int]:
    """Numbers that are no keys of pairs."""
    return count(2, 4)


def as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The texts of a column of any text type as bytes."""
    kind = column.type
    return (column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column).cast(pa.binary())


def _joined(query: Keys, passage: Keys) -> Keys:
    keys: Keys = (query * _OF_QUERY ^ passage) & ~np.uint64(3)
    return keys


def _of_places(texts: pa.ChunkedArray) -> Keys:
    return np.concatenate([np.zeros(0, np.uint64), *map(_of_places_in, texts.chunks)])


def _of_places_in(texts: pa.BinaryArray) -> Keys:
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    keys: Keys = lengths.view(np.uint64) * _OF_LENGTH
    is_short = lengths < _WORD
    if data is not None and data.size >= _WORD:
        words = np.ndarray((data.size - _WORD + 1,), "<u8", np.frombuffer(data, np.uint8), strides=(1,))
        room = np.maximum(lengths - _WORD, 0)  # 0 in short texts, whose words are not used
        starts = np.minimum(starts, len(words) - 1)
        keys += words[starts] * _OF_FIRST + words[starts + room] * _OF_LAST
    if is_short.any():
        keys[is_short] = _hashes(texts.filter(pa.array(is_short)))
    return keys


def _hashes(texts: pa.Array | pa.ChunkedArray) -> Keys:
    objects = texts.to_numpy(zero_copy_only=False)
    return np.fromiter(map(hash, objects), np.int64, len(objects)).view(np.uint64)
