"""Checks the quotes of CSV: each field in quotes must end where its writer meant it to end.

Arrow continues a field after its closing quote, and takes the rest of the file for one field if a quote is
never closed. So a stray quote would silently merge rows. The bytes are checked while Arrow reads them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import BYTE_ORDER_MARK
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream

MAX_FIELD_MIB = 16
"""Most MiB of a field in quotes, unless the reader is given another bound."""

_PIECE_BYTES = 1 << 20
"""Number of bytes that are checked at a time; with more, the arrays do not fit into the caches of a
processor.
"""

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

_QUOTE = ord('"')
_BEHIND = (
    "something other than a delimiter or a line's end is behind the closing quote of the field that begins "
    'here; write a quote inside of a field in quotes twice: ""'
)


def open_quoted(path: AnyPath, delimiter: str, max_field_mib: int, way_out: str) -> pa.NativeFile:
    """Open a CSV file as `open_stream` does; reading it raises `InputError` where quotes are wrong.

    Quotes are wrong if a closing quote is followed by anything but a delimiter or a line end, if a quote is
    never closed, or if a field in quotes is longer than `max_field_mib` MiB. `way_out` tells the user what to
    do about a field that is meant to be longer.

    A last line without an end gets one, because Arrow takes an empty field at the end of a file for one in
    quotes if the field before it is in quotes.
    """
    return pa.PythonFile(_Checked(path, Quotes(delimiter, max_field_mib << 20), way_out), mode="r")


class _Checked:
    def __init__(self, path: AnyPath, quotes: Quotes, way_out: str) -> None:
        self._path = path
        self._stream = open_stream(path)
        self._quotes = quotes
        self._way_out = way_out
        self._last = b"\n"

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def close(self) -> None:
        self._stream.close()

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                self._quotes.look(data[start : start + _PIECE_BYTES])
            if not data:
                self._quotes.look(data)
        except Misquoted as error:
            more = f"; if it is whole, {self._way_out}" if error.is_long else ""
            raise InputError(f"{self._path}, line {_line(self._path, error.place)}: {error}{more}") from None
        data = data or (b"" if self._last in b"\r\n" else b"\n")
        self._last = data[-1:] or self._last
        return data


class Misquoted(Exception):
    """Raised if quotes are wrong; ``place`` is the byte at which the field in quotes begins."""

    def __init__(self, place: int, message: str, *, is_long: bool = False) -> None:
        super().__init__(message)
        self.place = place
        self.is_long = is_long


class Quotes:
    """Follows the quotes through a file, a piece at a time.

    Consecutive quotes are one *run*. An even run is an empty field, or stands for quotes inside a field, so
    it neither opens nor closes a field. An odd run closes the open field; if no field is open, it opens one
    if a field begins there, and otherwise is part of a field without quotes. So whether a field is open after
    a run can be computed from the number of runs since the last run that can only close a field. No loop over
    the quotes is needed.

    Parameters
    ----------
    delimiter
        The character between two fields.
    longest
        Most bytes of a field in quotes; at least the bytes of a piece.
    """

    def __init__(self, delimiter: str, longest: int) -> None:
        self._edges = np.zeros(256, bool)
        self._edges[[ord(delimiter), ord("\n"), ord("\r")]] = True
        self._longest = longest
        self._at = 0
        self._before = ord("\n")
        self._held = b""
        self._open: int | None = None
        """The byte at which the open field begins; ``None`` if no field is open."""

    def look(self, data: bytes) -> None:
        """Check the next bytes of the file; at its end, call this with empty `data`.

        Raises
        ------
        Misquoted
            The quotes are wrong.
        """
        if not self._at and data.startswith(BYTE_ORDER_MARK):
            data, self._at = data[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
        piece = self._held + data if self._held else data
        whole = piece.rstrip(b'"') if data else piece  # the next piece may continue the last run of quotes
        self._held = piece[len(whole) :]
        if b'"' in whole:
            self._follow(np.frombuffer(whole, np.uint8))
        self._at += len(whole)
        self._before = whole[-1] if whole else self._before
        if self._open is not None:
            self._check_length(self._open, self._at)
            if not data:
                raise Misquoted(self._open, "the field in quotes that begins here is never closed")

    def _follow(self, raw: Bytes) -> None:
        quotes = np.flatnonzero(raw == _QUOTE)
        was_open = int(self._open is not None)
        opens, closes = quotes[was_open::2], quotes[1 - was_open :: 2]
        # in most files, each quote opens or closes a field
        if not (self._are_edges(raw, opens - 1) and self._are_edges(raw, closes + 1)):
            opens, closes = self._by_runs(raw, quotes)
        if self._open is not None and len(closes):
            self._check_length(self._open, int(closes[0]) + self._at)
        if len(closes) == was_open + len(opens):
            self._open = None
        elif len(opens):
            self._open = int(opens[-1]) + self._at

    def _are_edges(self, raw: Bytes, places: Places) -> bool:
        """Whether all places, which are in order, hold a delimiter or a line end."""
        if not len(places):
            return True
        return places[0] >= 0 and places[-1] < len(raw) and bool(self._edges[raw[places]].all())

    def _by_runs(self, raw: Bytes, quotes: Places) -> tuple[Places, Places]:
        """The quotes that open and close fields, except fields that are empty or consist of quotes."""
        gaps = np.flatnonzero(np.diff(quotes) > 1)
        first, last = quotes[np.r_[0, gaps + 1]], quotes[np.r_[gaps, len(quotes) - 1]]
        begins, ends = self._edges[raw[first - 1]], self._edges[raw[np.minimum(last + 1, len(raw) - 1)]]
        if first[0] == 0:
            begins[0] = self._edges[self._before]
        ends[-1] |= last[-1] + 1 == len(raw)  # the end of the file counts as an edge
        is_odd = (last - first) % 2 == 0
        turns = np.cumsum(is_odd & begins) + (self._open is not None)
        is_open = (turns - np.maximum.accumulate(np.where(is_odd & ~begins, turns, 0))) % 2 == 1
        was_open = np.r_[self._open is not None, is_open[:-1]]
        opens, closes = first[is_open & ~was_open], last[was_open & ~is_open]
        wrong = np.flatnonzero(~ends & np.where(is_odd, was_open, begins & ~was_open))
        if len(wrong):
            place = int(first[wrong[0]])
            if was_open[wrong[0]]:
                place = int(np.r_[(self._open or 0) - self._at, opens[opens < place]][-1])
            raise Misquoted(place + self._at, _BEHIND)
        return opens, closes

    def _check_length(self, start: int, end: int) -> None:
        if end - start > self._longest:
            bound = f"{self._longest >> 20} MiB"
            message = (
                f"the field in quotes that begins here is longer than {bound}; is its closing quote missing"
            )
            raise Misquoted(start, message, is_long=True)


def _line(path: AnyPath, place: int) -> int:
    """The number (from 1) of the line that contains the byte at `place`."""
    line, last = 1, b""
    with open_stream(path) as stream:
        while place > 0 and (data := stream.read(min(place, _PIECE_BYTES))):
            place -= len(data)
            line += data.count(b"\n") + data.count(b"\r") - (last + data).count(b"\r\n")
            last = data[-1:]
    return line
