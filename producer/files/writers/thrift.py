"""Thrift's compact protocol, in which the footer of a Parquet file is written, without knowing its fields.

A struct is a dictionary of its fields by number, each with its type, so that a changed footer keeps the
fields that nobody here knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, _MAP, STRUCT = range(1, 13)

_MOST_DEPTH = 32
_MOST_SHIFT = 63
_SHORT = 15
"""Lists of this length or more, and fields whose number is so far from the last one, say it in a varint."""


class Typed(NamedTuple):
    """A value and its type; that of a boolean says what it is, and its value is ``None``."""

    kind: int
    value: Any


Struct: TypeAlias = dict[int, Typed]


class Items(NamedTuple):
    """A list: the type of its items, and the items."""

    kind: int
    values: list[Any]


def read_struct(data: bytes) -> Struct:
    """Read a struct.

    Raises
    ------
    ValueError
        The data is not one, or has a map.
    """
    try:
        return _Reader(data).struct(0)
    except IndexError:
        raise ValueError("the data ends within a struct") from None


def write_struct(struct: Struct) -> bytes:
    """The bytes of a struct."""
    out = bytearray()
    _write_struct(out, struct)
    return bytes(out)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int) -> Struct:
        if depth > _MOST_DEPTH:
            raise ValueError("structs are nested too deeply")
        found: Struct = {}
        number = 0
        while head := self._byte():
            kind = head & 0x0F
            number = number + (head >> 4) if head >> 4 else self._integer()
            found[number] = Typed(kind, None if kind in {TRUE, FALSE} else self._value(kind, depth))
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind in {I16, I32, I64}:
            return self._integer()
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in {LIST, SET}:
            return self._items(depth + 1)
        if kind in {TRUE, FALSE, BYTE}:  # in a list, a boolean is a byte
            return self._byte()
        if kind == DOUBLE:
            return self._bytes(8)
        raise ValueError(f"type {kind} is not expected")

    def _items(self, depth: int) -> Items:
        head = self._byte()
        count = head >> 4
        if count == _SHORT:
            count = self._varint()
        kind = head & 0x0F
        return Items(kind, [self._value(kind, depth) for _ in range(count)])

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._data):
            raise IndexError
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
            shift += 7
            if shift > _MOST_SHIFT:
                raise ValueError("a number is too large")

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)


def _write_struct(out: bytearray, struct: Struct) -> None:
    last = 0
    for number, (kind, value) in sorted(struct.items()):
        step = number - last
        if 0 < step <= _SHORT:
            out.append(step << 4 | kind)
        else:
            out.append(kind)
            _write_varint(out, _zigzag(number))
        last = number
        if value is not None:
            _write_value(out, kind, value)
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind == BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind in {I16, I32, I64}:
        _write_varint(out, _zigzag(value))
    elif kind == STRUCT:
        _write_struct(out, value)
    elif kind in {LIST, SET}:
        count = len(value.values)
        out.append(min(count, _SHORT) << 4 | value.kind)
        if count >= _SHORT:
            _write_varint(out, count)
        for item in value.values:
            _write_value(out, value.kind, item)
    elif kind == DOUBLE:
        out += value
    else:
        out.append(value)


def _write_varint(out: bytearray, number: int) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1
