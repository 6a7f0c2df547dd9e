"""Which chunk asks for a pair: a hash table in arrays, for the keys of a whole chunk at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from producer.reuse.pair_keys import Keys

Numbers = npt.NDArray[np.int64]

NOBODY = -1
"""The chunk where none asks."""

_FEWEST_BITS = 12
_ROOM = 4
"""Fewest places for each key. With four, at most one key in eight finds its place taken."""


class AskedPairs:
    """The chunk that asks for a pair, and its row there, by the pair's key.

    The first bits of a key are its place in the arrays. A key whose place another key has is in a
    dictionary, and the place counts it. So a chunk of keys costs a few array operations, where a dictionary
    of all keys costs several operations for each.
    """

    def __init__(self) -> None:
        self._count = 0
        self._make(_FEWEST_BITS)

    def find(self, keys: Keys) -> tuple[Numbers, Numbers]:
        """The chunk that asks for each key, or `NOBODY`, and the row in what that chunk asks for."""
        places = self._places(keys)
        chunks, rows = self._chunks[places], self._rows[places]
        chunks[self._keys[places] != keys] = NOBODY
        crowded = np.flatnonzero(self._others[places])
        for place, key in zip(crowded.tolist(), keys[crowded].tolist(), strict=True):
            if key in self._rest:
                chunks[place], rows[place] = self._rest[key]
        return chunks, rows

    def add(self, chunk: int, keys: Keys) -> None:
        """Note that `chunk` asks for rows with these keys, which are distinct and which nobody asks for."""
        self._count += len(keys)
        if self._count * _ROOM > len(self._keys):
            self._grow()
        self._put(np.full(len(keys), chunk), np.arange(len(keys)), keys)

    def remove(self, keys: Keys) -> None:
        """Forget keys that a chunk asks for."""
        self._count -= len(keys)
        places = self._places(keys)
        here = (self._keys[places] == keys) & (self._chunks[places] != NOBODY)
        self._chunks[places[here]] = NOBODY
        for key in keys[~here].tolist():
            del self._rest[key]
        np.subtract.at(self._others, places[~here], 1)

    def _make(self, bits: int) -> None:
        self._bits = bits
        self._keys = np.zeros(1 << bits, np.uint64)
        self._chunks = np.full(1 << bits, NOBODY)
        self._rows = np.zeros(1 << bits, np.int64)
        self._others = np.zeros(1 << bits, np.uint32)
        """How many keys of a place are in the dictionary."""
        self._rest: dict[int, tuple[int, int]] = {}

    def _places(self, keys: Keys) -> npt.NDArray[np.intp]:
        return (keys >> np.uint64(64 - self._bits)).astype(np.intp)

    def _put(self, chunks: Numbers, rows: Numbers, keys: Keys) -> None:
        places, order = self._places(keys), np.arange(len(keys))
        free = self._chunks[places] == NOBODY
        self._rows[places[free]] = order[free]  # the last one of several with the same place has it
        here = free & (self._rows[places] == order)
        self._keys[places[here]], self._chunks[places[here]] = keys[here], chunks[here]
        self._rows[places[here]] = rows[here]
        others = zip(chunks[~here].tolist(), rows[~here].tolist(), strict=True)
        self._rest |= zip(keys[~here].tolist(), others, strict=True)
        np.add.at(self._others, places[~here], 1)

    def _grow(self) -> None:
        """Make room for all keys that are counted, for twice as many where keys are there already."""
        live, rest = self._chunks != NOBODY, self._rest
        keys = np.concatenate([self._keys[live], np.fromiter(rest, np.uint64, len(rest))])
        others = np.array([*rest.values()], np.int64).reshape(-1, 2)
        chunks = np.concatenate([self._chunks[live], others[:, 0]])
        rows = np.concatenate([self._rows[live], others[:, 1]])
        self._make((self._count * _ROOM - 1).bit_length())
        self._put(chunks, rows, keys)
