"""Reads a JSON array of objects as a stream of JSON lines."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import MAX_LINE_BYTES, NOT_UTF8, TOO_LONG
from rankmill.producer.files.stores.paths import AnyPath

MAX_DEPTH = 32
"""Lists and objects in JSON may be nested at most this deep; a file with deeper ones is refused.

Arrow cannot read Parquet files with more than 100 levels, and a list needs two or three of these levels.
"""

_READ_BYTES = 1 << 20
_BLOCK_CHARS = 4 << 20
_STRICT = json.JSONDecoder()
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


def array_blocks(path: AnyPath, stream: pa.NativeFile, start: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield ``(item, block)``. A block has a line for each of its items; ``item`` is the number (from 1) of
    the first one.

    Parameters
    ----------
    path
        The file, for messages.
    stream
        The file, read up to the end of `start`.
    start
        The beginning of the file, with the opening bracket.

    Raises
    ------
    InputError
        The file is not a JSON array in UTF-8, or an item is too long or nested too deeply.
    """
    lines: list[str] = []
    number, size = 1, 0
    for line in _items(path, _Text(path, stream, start)):
        lines.append(line)
        size += len(line)
        if size >= _BLOCK_CHARS:
            yield number, "\n".join(lines).encode("utf-8", "surrogatepass")
            number, size, lines = number + len(lines), 0, []
    if lines:
        yield number, "\n".join(lines).encode("utf-8", "surrogatepass")


class _Text:
    """Decodes a JSON file for a parser, some bytes at a time.

    ``text`` has the characters that were read. ``at`` is the index of the first character that the parser has
    not used yet.
    """

    def __init__(self, path: AnyPath, stream: pa.NativeFile, start: bytes) -> None:
        self._path = path
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.at = 0
        self._add(start)

    def more(self) -> bool:
        data = self._stream.read(_READ_BYTES)
        self._add(data)
        return bool(data)

    def next(self) -> str:
        """Skip white space, and return the next character, or an empty string at the end of the file."""
        while not (found := _NOT_SPACE.search(self.text, self.at)):
            self.at = len(self.text)
            if not self.more():
                return ""
        self.at = found.start()
        return found[0]

    def _add(self, data: bytes) -> None:
        try:
            self.text = self.text[self.at :] + self._decoder.decode(data, final=not data)
        except UnicodeDecodeError:
            raise InputError(f"{self._path}: {NOT_UTF8}") from None
        self.at = 0


def _items(path: AnyPath, text: _Text) -> Iterator[str]:
    decoder = json.JSONDecoder(strict=False)
    text.next()
    text.at += 1
    after, number = text.next(), 0
    if after == "]":
        text.at += 1
    while after != "]":
        number += 1
        where = f"{path}, item {number}"
        yield _item(where, text, decoder)
        after = text.next()
        text.at += 1
        if after not in {",", "]"}:
            raise InputError(f"{where}: not JSON: no comma after it (is the file truncated?)")
    if text.next():
        raise InputError(f"{path}: there is something after the array")


def _item(where: str, text: _Text, decoder: json.JSONDecoder) -> str:
    while True:
        text.next()
        try:
            value, end = decoder.raw_decode(text.text, text.at)
        except json.JSONDecodeError as error:
            if len(text.text) - text.at > MAX_LINE_BYTES:
                raise InputError(f"{where}: {TOO_LONG}") from None
            if not text.more():
                raise InputError(f"{where}: not JSON: {error.msg}") from None
            continue
        except RecursionError:
            raise InputError(f"{where}: lists and objects nested deeper than {MAX_DEPTH}") from None
        except ValueError as error:  # the item has an integer of thousands of digits
            raise InputError(f"{where}: {error}") from None
        if end < len(text.text) or not text.more():  # at the end, ``12`` may be the start of ``123``
            break
    raw = text.text[text.at : end]
    text.at = end
    return _in_one_line(raw, value) if "\n" in raw or "\r" in raw else raw


def _in_one_line(raw: str, value: Any) -> str:
    """Put an item of a JSON array into one line. If a string in the item has a control character, the item is
    encoded anew.
    """
    try:
        _STRICT.raw_decode(raw)  # raises an error if a string contains a control character
    except ValueError:
        return json.dumps(value)
    return raw.replace("\n", " ").replace("\r", " ")
