"""Keys by which repeated pairs are noticed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""With this factor the key of a query and a passage is not that of the two exchanged."""


def pair_keys(table: pa.Table, columns: tuple[str, str]) -> list[int]:
    """A number of 64 bits for each row's pair: equal pairs have equal numbers, others hardly ever.

    The numbers are made of Python's own hashes, so they mean nothing to another process.
    """
    query, passage = (as_bytes(table[name]) for name in columns)
    hashes = [np.zeros(0, np.uint64)]
    for part in pc.dictionary_encode(query, null_encoding="encode").chunks:
        hashes.append(_hashes(part.dictionary)[np.asarray(part.indices)])
    keys: list[int] = (np.concatenate(hashes) * _ODD ^ _hashes(passage)).tolist()
    return keys


def as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The texts of a column of any text type as bytes."""
    kind = column.type
    return (column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column).cast(pa.binary())


def _hashes(texts: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    objects = texts.to_numpy(zero_copy_only=False)
    return np.fromiter(map(hash, objects), np.int64, len(objects)).view(np.uint64)
