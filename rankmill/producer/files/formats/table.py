"""Finds installed formats, which are entry points of ``rankmill.formats``, by the endings of files' names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rankmill import plugins
from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import Format, MakeReader, Reader, ReadOptions
from rankmill.producer.files.formats.lists import ListReader
from rankmill.producer.files.stores.paths import AnyPath

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@cache
def formats() -> tuple[Format, ...]:
    """Import and return all installed formats of files, first rankmill's own."""
    return tuple(plugins.load_all("rankmill.formats"))


@cache
def of_ending(ending: str) -> Format | None:
    """Find the format for an ending such as ``.csv``. Returns ``None`` if no format has this ending."""
    try:
        named: Format = plugins.load("rankmill.formats", ending.removeprefix("."))
    except KeyError:
        return next((form for form in formats() if ending in form.endings), None)
    return named


def read_endings() -> str:
    """List the endings of all files that can be read as pairs, for a message."""
    endings = (ending for form in formats() if form.reader for ending in form.endings)
    return ", ".join(endings) + " (text also as .gz or .zst)"


def written_formats() -> tuple[Format, ...]:
    """Return the installed formats in which outputs can be written."""
    return tuple(form for form in formats() if form.writer)


def format_of(path: AnyPath) -> Format | None:
    """Return the format of a file by its name's ending, such as CSV for ``a.csv`` and ``a.csv.gz``.

    Returns ``None`` if no format has the ending, or if the format cannot be compressed: ``a.parquet.gz``.
    """
    ending, compression = split_ending(path)
    form = of_ending(ending)
    return None if form and compression and not form.is_text else form


def split_ending(path: AnyPath) -> tuple[str, str | None]:
    """Split the ending of a file's name: ``a.csv.gz`` gives ``.csv`` and ``gzip``, ``a.csv`` gives ``.csv``
    and ``None``.
    """
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    compression = COMPRESSIONS.get(suffixes[-1])
    return suffixes[-2 if compression else -1], compression


def stem(path: AnyPath) -> str:
    """Remove the endings of format and compression from a file's name: ``a.b`` for ``a.b.csv.gz``."""
    return (path.with_suffix("") if split_ending(path)[1] else path).stem


def is_output_name(name: str) -> bool:
    """Whether a name has an ending of a format in which outputs can be written."""
    return any(
        name.lower().endswith(ending + compression)
        for form in written_formats()
        for ending in form.endings
        for compression in ("", *(COMPRESSIONS if form.is_text else ()))
    )


def is_readable(path: AnyPath) -> bool:
    """Whether a file's name has the ending of a format that can be read as a table."""
    form = format_of(path)
    return form is not None and form.reader is not None


def check_readable(path: AnyPath) -> MakeReader:
    """Return the function that makes the reader of a file. Raises `InputError` if the file's name does not
    have the ending of a readable format.
    """
    form = format_of(path)
    if form is None or form.reader is None:
        is_stdin = str(path) in {"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"}
        way_out = "; the name of standard input is -" if is_stdin else ""
        raise InputError(f"{path}: cannot tell what is in it; its name must end in {read_endings()}{way_out}")
    return form.reader


def open_reader(path: AnyPath, texts: Sequence[str] = (), options: ReadOptions | None = None) -> Reader:
    """Make a reader for a file, in the format that the ending of its name gives.

    Parameters
    ----------
    path
        The file.
    texts
        The columns to read as text.
    options
        How to read the file.

    Raises
    ------
    InputError
        The file cannot be read, or its name does not say its format.
    """
    options = options or ReadOptions()
    reader = check_readable(path)(path, [name for name in texts if name not in options.lists], options)
    return ListReader(path, reader, texts, options.lists) if options.lists else reader
