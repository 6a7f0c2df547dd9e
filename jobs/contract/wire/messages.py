"""The messages of an Arrow stream, checked before Arrow reads them."""

from __future__ import annotations

import struct

from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.schema import MAX_CHUNK_ROWS

_MAX_METADATA = 64 << 10
"""Most bytes of metadata in a message; rankmill's messages have about 200."""

_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
"""Kinds of messages."""


def check_messages(stream: memoryview, dictionaries: int) -> None:
    """Refuse a stream that needs more memory than its own bytes, before Arrow reads it.

    A valid stream is a schema, the given number of dictionaries and one batch; none of its messages is
    compressed. Each message starts with a marker and the size of its metadata, a flatbuffer with the
    body's size.
    """
    kinds, at = [], 0
    while True:
        marker, size = struct.unpack_from("<Ii", stream, at)
        at += 8
        if marker != 0xFFFFFFFF or not 0 <= size <= _MAX_METADATA:
            raise WireError(
                "a payload is damaged: a message of its Arrow stream has an invalid or too large size"
            )
        if not size:
            break
        metadata = stream[at : at + size]
        kind, body = _check_message(metadata)
        kinds.append(kind)
        at += size + body
        if at > len(stream):
            raise WireError("a payload is damaged: its Arrow stream is truncated")
    if at != len(stream) or kinds not in ([_SCHEMA, *[_DICTIONARY] * n, _BATCH] for n in (0, dictionaries)):
        raise WireError("a payload is not an Arrow stream of one batch")


def _check_message(metadata: memoryview) -> tuple[int, int]:
    """Return the kind and body size (bytes) of a message; refuse a compressed or too long batch."""
    message = _number("<I", metadata, 0)
    kind = _number("<B", metadata, _field(metadata, message, 1))
    header = _table(metadata, _field(metadata, message, 2))
    body = _number("<q", metadata, _field(metadata, message, 3))
    if kind == _DICTIONARY:
        if _number("<B", metadata, _field(metadata, header, 2)):
            raise WireError("a payload has a dictionary in several messages")
        header = _table(metadata, _field(metadata, header, 1))
    if kind in {_DICTIONARY, _BATCH}:
        rows = _number("<q", metadata, _field(metadata, header, 0))
        if not 0 <= rows <= MAX_CHUNK_ROWS:
            raise WireError(f"a chunk of {rows:,} rows is over the limit of {MAX_CHUNK_ROWS:,}")
        if _field(metadata, header, 3) is not None:
            raise WireError("a payload has a compressed message inside its Arrow stream")
    if body < 0:
        raise WireError("a payload is damaged: a message of its Arrow stream has a negative size")
    return kind, body


def _field(flatbuffer: memoryview, table: int, number: int) -> int | None:
    """Offset of a field of a flatbuffer's table; ``None`` if the field is absent, which means 0."""
    fields = table - _number("<i", flatbuffer, table)
    place = 4 + 2 * number
    if place >= _number("<H", flatbuffer, fields):
        return None
    offset = _number("<H", flatbuffer, fields + place)
    return table + offset if offset else None


def _table(flatbuffer: memoryview, field: int | None) -> int:
    """Offset of the table to which a field refers."""
    return (field or 0) + _number("<I", flatbuffer, field)


def _number(form: str, flatbuffer: memoryview, at: int | None) -> int:
    if at is None:
        return 0
    if at < 0:  # Python would index from the end
        raise WireError("a payload is damaged: an offset in its Arrow stream is negative")
    return int(struct.unpack_from(form, flatbuffer, at)[0])
