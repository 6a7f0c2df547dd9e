"""Standard input as a file: kept in the run's folder, because an input is read more than once."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
from pathlib import Path

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.producer.files.inputs import InputFile
from rankmill.producer.files.stores.writing import discard

_READ_BYTES = 1 << 20


def receive(folder: Path) -> tuple[InputFile, str]:
    """Write standard input to a file in `folder`; return the file and a digest of its content.

    The file's name says its format, which is noticed from its beginning: Parquet, JSON, or else text with
    delimiters; text may be compressed with gzip or zstd.

    Raises
    ------
    InputError
        Standard input is a terminal.
    OutputError
        The file cannot be written.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("standard input (-) is a terminal; pipe a file into the command")
    forget(folder)
    digest = hashlib.sha256()
    path = folder / "stdin"
    start = b""
    try:
        with path.open("wb") as file:
            while data := sys.stdin.buffer.read(_READ_BYTES):
                start = start or data
                digest.update(data)
                file.write(data)
        kept = path.rename(folder / f"stdin{_ending(start)}")
    except OSError as error:
        raise OutputError(f"cannot keep standard input in {folder}: {error.strerror}") from None
    return InputFile(kept), f"digest {digest.hexdigest()}"


def forget(folder: Path) -> None:
    """Delete what `receive` has written."""
    for path in folder.glob("stdin*"):
        discard(path)


def _ending(start: bytes) -> str:
    if start.startswith(b"PAR1"):
        return ".parquet"
    for magic, ending in ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst")):
        if start.startswith(magic):
            return _text_ending(_unpacked(start, ending)) + ending
    return _text_ending(start)


def _text_ending(start: bytes) -> str:
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first in {b"{", b"["}:
        return ".json"
    line = start.split(b"\n", 1)[0]
    return ".tsv" if b"\t" in line and b'"' not in line else ".csv"


def _unpacked(start: bytes, ending: str) -> bytes:
    """The beginning of compressed text; nothing if it is damaged, which its reader will say."""
    try:
        if ending == ".gz":
            return gzip.GzipFile(fileobj=io.BytesIO(start)).read(1024)
        with pa.CompressedInputStream(pa.BufferReader(start), "zstd") as stream:
            return bytes(stream.read(1024))
    except (OSError, EOFError, pa.ArrowException):
        return b""
