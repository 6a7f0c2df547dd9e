"""Which row of the window asks for a pair: a hash table in arrays, for the keys of a whole chunk at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankmill.producer.collect.reuse.pair_keys import Keys

Numbers = npt.NDArray[np.int64]

NOBODY = -1
"""The number where no row asks."""

_FEWEST_BITS = 12
_ROOM = 4
"""Fewest places for each key. With four, at most one key in eight finds its place taken."""


class AskedPairs:
    """The number of the row that asks for a pair, by the pair's key.

    The first bits of a key are its place in the arrays. A key whose place another key has is in a
    dictionary, and the place counts it. So a chunk of keys costs a few array operations, where a dictionary
    of all keys costs several operations for each.
    """

    def __init__(self) -> None:
        self._count = 0
        self._make(_FEWEST_BITS)

    def find(self, keys: Keys) -> Numbers:
        """The number of the row that asks for each key, or `NOBODY`."""
        places = self._places(keys)
        found: Numbers = np.where(self._keys[places] == keys, self._numbers[places], NOBODY)
        crowded = np.flatnonzero(self._others[places])
        for each, key in zip(crowded.tolist(), keys[crowded].tolist(), strict=True):
            if key in self._rest:
                found[each] = self._rest[key]
        return found

    def add(self, keys: Keys, numbers: Numbers) -> None:
        """Note the rows that ask for `keys`, which are distinct and for which none has asked."""
        self._count += len(keys)
        if self._count * _ROOM > len(self._keys):
            self._grow()
        self._put(keys, numbers)

    def remove(self, keys: Keys) -> None:
        """Forget keys that were added."""
        self._count -= len(keys)
        places = self._places(keys)
        here = (self._keys[places] == keys) & (self._numbers[places] != NOBODY)
        self._numbers[places[here]] = NOBODY
        for key in keys[~here].tolist():
            del self._rest[key]
        np.subtract.at(self._others, places[~here], np.uint32(1))

    def _make(self, bits: int) -> None:
        self._bits = bits
        self._keys = np.zeros(1 << bits, np.uint64)
        self._numbers = np.full(1 << bits, NOBODY)
        self._others = np.zeros(1 << bits, np.uint32)
        """How many keys of a place are in the dictionary."""
        self._rest: dict[int, int] = {}

    def _places(self, keys: Keys) -> npt.NDArray[np.intp]:
        return (keys >> np.uint64(64 - self._bits)).astype(np.intp)

    def _put(self, keys: Keys, numbers: Numbers) -> None:
        places = self._places(keys)
        free = self._numbers[places] == NOBODY
        self._numbers[places[free]] = numbers[free]  # of several with the same place, the last one has it
        here = self._numbers[places] == numbers
        self._keys[places[here]] = keys[here]
        self._rest |= zip(keys[~here].tolist(), numbers[~here].tolist(), strict=True)
        np.add.at(self._others, places[~here], np.uint32(1))

    def _grow(self) -> None:
        """Make room for all keys that are counted."""
        live, rest = self._numbers != NOBODY, self._rest
        keys = np.concatenate([self._keys[live], np.fromiter(rest, np.uint64, len(rest))])
        numbers = np.concatenate([self._numbers[live], np.fromiter(rest.values(), np.int64, len(rest))])
        self._make((self._count * _ROOM - 1).bit_length())
        self._put(keys, numbers)
