"""Checks that each field in quotes in a CSV file ends where its writer meant it to end.

Arrow continues a field after its closing quote, and takes the rest of the file for one field if a quote is
never closed. So a stray quote would silently merge rows. The bytes are checked while Arrow reads them.
"""

from __future__ import annotations

import re

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import BYTE_ORDER_MARK, MAX_LINE_BYTES, TOO_LONG
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream

_PIECE_BYTES = 1 << 20
"""The quotes of a CSV file are checked in pieces of this many bytes."""

_INSIDE = re.compile(rb'(?:[^"]++|"")*+')
"""Matches the inside of a field in quotes, where a doubled quote stands for a quote."""

_BEHIND = (
    "something other than a delimiter or a line's end is behind the closing quote of the field that begins "
    'here; write a quote inside of a field in quotes twice: ""'
)


def open_quoted(path: AnyPath, delimiter: str) -> pa.NativeFile:
    """Open a CSV file; reading it raises `InputError` where the quotes are wrong.

    Quotes are wrong in three cases:

    - A closing quote is followed by anything but a delimiter or a line end.
    - A quote is never closed.
    - A field in quotes has more than `MAX_LINE_BYTES`.

    If the last line has no line end, one is added. Without it, Arrow would misread a last line such as
    ``"a",``: it would take the empty field at the end for a field in quotes.
    """
    return pa.PythonFile(_Checked(path, Quotes(delimiter)), mode="r")


class _Checked:
    def __init__(self, path: AnyPath, quotes: Quotes) -> None:
        self._path = path
        self._stream = open_stream(path)
        self._quotes = quotes
        self._last = b"\n"

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def close(self) -> None:
        self._stream.close()

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        try:
            for start in range(0, len(data) or 1, _PIECE_BYTES):
                self._quotes.look(data[start : start + _PIECE_BYTES])
        except Misquoted as error:
            raise InputError(f"{self._path}, line {_line(self._path, error.place)}: {error}") from None
        data = data or (b"" if self._last in b"\r\n" else b"\n")
        self._last = data[-1:] or self._last
        return data


class Misquoted(Exception):
    """Raised if quotes are wrong; ``place`` is the byte at which the field in quotes begins."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


class Quotes:
    """Checks the quotes of a CSV file, whose bytes are given to `look` one part after the other.

    Parameters
    ----------
    delimiter
        The character between two fields.
    """

    def __init__(self, delimiter: str) -> None:
        self._edges = f"{delimiter}\n\r".encode()
        edge = b"[%b]" % re.escape(self._edges)
        field = rb'"%b"(?=%b)' % (_INSIDE.pattern, edge)
        # a quote that is not at the beginning of a field is an ordinary character
        self._outside = re.compile(rb'(?:[^"]++|(?<!%b)"|%b)*+' % (edge, field))
        self._rest, self._at = b"\n", -1
        """`_rest` has the last byte that was checked, and the bytes after that byte. `_at` is the place in
        the file at which `_rest` begins.
        """
        self._open: int | None = None
        """Place in the file of the quote that is open, or ``None`` if no quote is open."""

    def look(self, data: bytes) -> None:
        """Check the next bytes of the file; at its end, call this with empty `data`.

        Raises
        ------
        Misquoted
            The quotes are wrong.
        """
        if self._at < 0 and data.startswith(BYTE_ORDER_MARK):
            data, self._at = data[len(BYTE_ORDER_MARK) :], self._at + len(BYTE_ORDER_MARK)
        piece, place = self._rest + (data or b"\n"), 1
        while True:
            if self._open is None:
                place = _end(self._outside, piece, place)
                if place == len(piece):
                    break
                self._open, place = self._at + place, place + 1
            place = _end(_INSIDE, piece, place)
            if self._at + place - self._open > MAX_LINE_BYTES:
                raise Misquoted(
                    self._open,
                    f"the closing quote of the field that begins here is missing, or the field is {TOO_LONG}",
                )
            if place + 1 >= len(piece):  # the next piece may begin with the second of two quotes
                break
            if piece[place + 1] not in self._edges:
                raise Misquoted(self._open, _BEHIND)
            self._open, place = None, place + 1
        if self._open is not None and not data:
            raise Misquoted(self._open, "the field in quotes that begins here is never closed")
        self._rest, self._at = piece[place - 1 :], self._at + place - 1


def _end(pattern: re.Pattern[bytes], piece: bytes, place: int) -> int:
    match = pattern.match(piece, place)
    assert match  # both patterns match the empty text, too
    return match.end()


def _line(path: AnyPath, place: int) -> int:
    """Return the number (from 1) of the line of a file that contains the byte at `place`."""
    line, last = 1, b""
    with open_stream(path) as stream:
        while place > 0 and (data := stream.read(min(place, _PIECE_BYTES))):
            place -= len(data)
            line += data.count(b"\n") + data.count(b"\r") - (last + data).count(b"\r\n")
            last = data[-1:]
    return line
