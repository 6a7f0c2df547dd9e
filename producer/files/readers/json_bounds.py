"""Checks of JSON Lines before Arrow parses them.

Arrow's parser recurses without a limit, and makes a column of every key with a value for each row of the
block: a few megabytes could crash the process or take all memory. The checks are cheap for usual lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError

MAX_LINE_BYTES = 16 << 20
"""Longest line, checked before it is parsed."""

MAX_DEPTH = 32
"""Deepest nesting of lists and objects. Parquet files with more than 100 levels cannot be read again, and a
list needs two or three of these levels."""

MAX_KEYS = 10_000
"""Most different keys in a block."""

_MAX_CELLS = 20_000_000
"""Most cells (columns times rows) that are parsed at a time."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_KEY = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")(\s*+:)?', re.DOTALL)
_LONG_INTEGER = re.compile(rb"[:\s,\[]-?[0-9]{16,}(?![0-9.eE])")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_OPENING = bytes(set(range(256)) - set(b"[{\n"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def is_plain(path: Path, line: int, block: bytes) -> bool:
    """Whether Arrow may parse `block`, which begins at `line`: each line is an object, not nested too deeply.

    A value that spans lines or hides a line's end may be deeper than any of its lines, so such a block is
    not plain. A block with spaces around its lines is not plain either. Python parses these blocks.

    Raises
    ------
    InputError
        A line is nested too deeply.
    """
    opened = block.translate(None, _NOT_OPENING).split(b"\n")
    if max(map(len, opened)) > MAX_DEPTH:
        lines = block.split(b"\n")
        for number, brackets in enumerate(opened):
            if len(brackets) > MAX_DEPTH:
                check_depth(path, line + number, lines[number])
    raw = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(raw))
    starts = np.concatenate([[0], ends[:-1] + 1])
    starts, ends = starts[starts < ends], ends[starts < ends]  # without blank lines
    last = ends - 1
    if b"\r" in block:
        last = last - (raw[last] == ord("\r"))
        if block.count(b"\r") != int((raw[ends - 1] == ord("\r")).sum()):
            return False
    return bool((raw[starts] == ord("{")).all() and (raw[last] == ord("}")).all())


def check_depth(path: Path, number: int, text: bytes) -> None:
    """Raise `InputError` if the line is nested too deeply."""
    if text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", text).translate(None, _NOT_BRACKETS)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InputError(f"{path}, line {number}: lists and objects nested deeper than {MAX_DEPTH}")


def slices(path: Path, line: int, block: bytes) -> Iterator[tuple[int, bytes]]:
    """Cut the block into pieces with few enough lines that all keys of the block can be columns of each.

    Raises
    ------
    InputError
        There are too many keys.
    """
    keys = block.count(b'":')
    if keys > MAX_KEYS or any(b'"' + space in block for space in (b" ", b"\t", b"\r", b"\n")):
        keys = len({key for key, colon in _KEY.findall(block) if colon})
    if keys > MAX_KEYS:
        raise InputError(
            f"{path}, from line {line} on: {keys:,} different keys; at most {MAX_KEYS:,} can be columns. "
            "Are some of them data?"
        )
    yield from cut(line, block, keys)


def cut(line: int, block: bytes, columns: int) -> Iterator[tuple[int, bytes]]:
    """Cut the block into pieces with few enough lines that each can have that many columns."""
    rows = max(_MAX_CELLS // max(columns, 1), 1)
    if block.count(b"\n") <= rows:
        yield line, block
        return
    lines = block.split(b"\n")
    for start in range(0, len(lines), rows):
        yield line + start, b"\n".join(lines[start : start + rows])


def check_integers(path: Path, line: int, block: bytes, schema: pa.Schema) -> None:
    """Raise `InputError` if a float column contains an integer that a float cannot hold exactly."""
    floating = [field.name for field in schema if pa.types.is_floating(field.type)]
    if not floating or not _LONG_INTEGER.search(block):
        return
    for number, text in enumerate(block.split(b"\n"), line):
        if not _LONG_INTEGER.search(text):
            continue
        try:
            record = json.loads(text, strict=False)
            lossy = [
                name for name in floating if isinstance(record.get(name), int) and _is_lossy(record[name])
            ]
        except ValueError as error:  # thousands of digits
            raise InputError(f"{path}, line {number}: {error}") from None
        if lossy:
            raise InputError(
                f"{path}, line {number}: column {lossy[0]!r} holds {str(record[lossy[0]])[:40]}, which a "
                "floating-point number cannot hold exactly; write it as a string"
            )


def _is_lossy(value: int) -> bool:
    try:
        return int(float(value)) != value
    except OverflowError:
        return True
