"""Finds the input files that paths, directories and globs name, or that standard input contains. Files that
rankmill wrote are left out.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.producer.files.formats.base import BYTE_ORDER_MARK, Format
from rankmill.producer.files.formats.ipc import MAGIC, STREAM_MAGIC
from rankmill.producer.files.formats.parquet import PARQUET, metadata_of
from rankmill.producer.files.formats.table import (
    COMPRESSIONS,
    check_readable,
    format_of,
    is_output_name,
    is_readable,
    read_endings,
)
from rankmill.producer.files.outputs import is_part
from rankmill.producer.files.stores.paths import (
    WORKSPACE,
    AnyPath,
    as_path,
    below,
    fixed_part,
    is_url,
    matches,
    resolved,
    workspace_of,
)
from rankmill.producer.files.stores.writing import discard

_READ_BYTES = 1 << 20

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputFile:
    """A file to read. The file ``day=5/a.csv`` has the ``partition`` ``(("day", "5"),)``."""

    path: AnyPath
    partition: tuple[tuple[str, str | None], ...] = ()

    @property
    def format(self) -> Format | None:
        return format_of(self.path)


@dataclass(frozen=True)
class RankingFiles:
    """The files of a ranking to score.

    Parameters
    ----------
    ranking, queries, corpus
        The run, and the files with the texts of its queries and passages.
    depth
        Number of the best passages to take for each query; ``None`` takes all.
    qrels
        Relevance judgements. They add the columns ``relevance`` (null for a passage without a judgement) and
        ``in_run``. They also add rows at the end, with false in ``in_run``, for passages that are relevant
        for a query of the ranking, but were not taken from the ranking.
    """

    ranking: InputFile
    queries: tuple[InputFile, ...]
    corpus: tuple[InputFile, ...]
    depth: int | None = None
    qrels: InputFile | None = None

    @property
    def all(self) -> tuple[InputFile, ...]:
        return (self.ranking, *self.queries, *self.corpus, *([self.qrels] if self.qrels else []))


def find_files(inputs: Sequence[str], output: str | None = None) -> tuple[InputFile, ...]:
    """Find the files that paths, directories and globs name, in order. Directories are searched recursively.

    Two kinds of files are left out:

    - Hidden files that a directory or glob contains (see `without_hidden`).
    - Files that rankmill wrote: folders of interrupted runs and the outputs of these runs, indexes of
      corpora, and lists of row errors. An earlier `output` counts if it is in Parquet and a directory or glob
      contains it.

    Raises
    ------
    InputError
        No files are found, or a file has a format that cannot be read.
    StoreError, RunnerError
        A store does not serve, or this process may not read an object.
    """
    named_files = [file for name in inputs for file in _found(name, inputs)]
    files = [file for file in named_files if not _is_left_behind(file.path)]
    named = {as_path(name) for name in inputs}
    kept = [file for file in files if file.path in named or not _is_output(file.path, output)]
    if not kept:
        raise InputError(f"{', '.join(inputs)}: holds only files that rankmill wrote; name other files")
    if len(kept) < len(named_files):
        logger.info(
            "left out of the input: %d files that rankmill itself wrote", len(named_files) - len(kept)
        )
    for file in kept:
        check_readable(file.path)
    return tuple(kept)


def _found(name: str, inputs: Sequence[str]) -> Iterator[InputFile]:
    path = as_path(name)
    files: Sequence[AnyPath]
    root: AnyPath
    if path.is_dir():
        files, root = _files_below(path), path
        if not files:
            raise InputError(f"{name}: no file with one of the endings {read_endings()} in this directory")
    elif path.exists():
        files, root = [path], path.parent if is_url(name) else _common_folder(inputs)
    elif matched := matches(path):
        files, root = without_hidden(matched, path), fixed_part(path)
    else:
        way_out = "; for the files in directories of such names, add /*" if glob.has_magic(name) else ""
        raise InputError(f"{name}: no such {'object' if is_url(name) else 'file'}{way_out}")
    for file in files:
        yield InputFile(file, _partition(file, root))


def _files_below(folder: AnyPath) -> list[AnyPath]:
    return without_hidden([file for file in below(folder) if is_readable(file)], folder / "**")


def without_hidden(files: Sequence[AnyPath], pattern: AnyPath) -> list[AnyPath]:
    """Return the files that are not hidden.

    A file is hidden if a name in its path, from the pattern's first wildcard on, begins with ``.`` or ``_``.
    There are two exceptions:

    - Folders of partitions, such as ``_day=1``, are not hidden.
    - If a name in the pattern itself begins so, as in ``_*/a.csv``, all files that the pattern matches are
      returned.

    Parameters
    ----------
    files
        The matches of the pattern.
    pattern
        The pattern (a glob).

    Raises
    ------
    InputError
        All matches are hidden.
    """
    root = fixed_part(pattern)
    if any(name.startswith((".", "_")) for name in pattern.parts[len(root.parts) :]):
        return list(files)
    kept = [file for file in files if not _is_hidden(file.parts[len(root.parts) :])]
    if files and not kept:
        raise InputError(
            f"{pattern}: holds only hidden files, such as {files[0]}: their names, or those of "
            "their folders, begin with . or _; name a file itself to have it read"
        )
    if len(kept) < len(files):
        logger.info("left out of the input: %d hidden files in %s", len(files) - len(kept), root)
    return kept


def _is_hidden(parts: Sequence[str]) -> bool:
    *folders, name = parts
    names = [name, *(folder for folder in folders if not _is_partition(folder))]
    return any(each.startswith((".", "_")) for each in names)


def _common_folder(inputs: Sequence[str]) -> Path:
    """Return the deepest folder that contains all input files.

    A shell may have expanded a pattern such as ``data/day=*/a.csv`` into these files. The folder is then
    ``data``, and the names of the folders below it give columns, such as ``day``.
    """
    folders = [str(Path(name).parent) for name in inputs if Path(name).is_file()]
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:  # absolute and relative paths are mixed
        return Path()


def _partition(path: AnyPath, root: AnyPath) -> tuple[tuple[str, str | None], ...]:
    """Read columns from the names of the folders between `root` and a file. Hive gives folders such names,
    for example ``date=2026-11-01``.
    """
    folders = path.parent.parts[len(root.parts) :] if path.is_relative_to(root) else ()
    pairs = [_printable(folder).partition("=") for folder in folders if _is_partition(folder)]
    return tuple(
        (unquote(name), None if text == _NULL_PARTITION else unquote(text)) for name, _, text in pairs
    )


def _is_partition(folder: str) -> bool:
    """Whether a folder's name says the value of a column, as ``date=2026-11-01`` does."""
    return "=" in folder.strip("=")


def _printable(name: str) -> str:
    """Replace the bytes of a file's name that are not UTF-8, so that the name can be encoded."""
    return os.fsencode(name).decode(errors="replace")


def _is_left_behind(path: AnyPath) -> bool:
    """Whether an earlier score-file has left the file. Such a file is a list of row errors, or is in the
    folder of a run or an index, whose name ends in ``.rankmill``.
    """
    name = path.name.lower()
    is_list = name.endswith(".errors.jsonl") and is_output_name(name.removesuffix(".errors.jsonl"))
    return is_list or any(folder.suffix.lower() == WORKSPACE for folder in path.parents)


def _is_output(path: AnyPath, output: str | None) -> bool:
    """Whether rankmill wrote the file, as `output` or as the output of a run whose folder still exists.

    If that folder is gone, only a file in Parquet tells that rankmill wrote it. Any other file at the path
    `output` stays in the input. The command then ends with an error, because its output would replace its
    input.
    """
    whole = resolved(path.parent if is_part(path.name) else path)
    is_named = output is not None and whole == resolved(as_path(output))
    is_unfinished = os.path.isdir(workspace_of(whole))  # noqa: PTH112 -- false if the name is too long
    if is_unfinished or not is_named or format_of(path) is not PARQUET:
        return is_unfinished
    try:
        return "rankmill.version" in metadata_of(path)
    except InputError:
        return False


def receive_stdin(folder: Path) -> tuple[InputFile, str]:
    """Write standard input to a file in `folder`, because the input is read more than once. Return this file,
    and a digest of its content.

    The first bytes of the input tell its format: Parquet, Arrow, or JSON. Any other input is taken for text
    with delimiters. The name of the file gets the ending of the format. Text may be compressed with gzip or
    zstd.

    Raises
    ------
    InputError
        Standard input is a terminal, or empty.
    OutputError
        The file cannot be written.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("standard input (-) is a terminal; pipe a file into the command")
    forget_stdin(folder)
    digest = hashlib.sha256()
    path = folder / "stdin"
    start = b""
    try:
        with path.open("wb") as file:
            while data := sys.stdin.buffer.read(_READ_BYTES):
                start = start or data
                digest.update(data)
                file.write(data)
        if not start:
            raise InputError("standard input (-) is empty: nothing came from the command before it")
        kept = path.rename(folder / f"stdin{_ending(start)}")
    except OSError as error:
        raise OutputError(f"cannot keep standard input in {folder}: {error.strerror}") from None
    return InputFile(kept), f"digest {digest.hexdigest()}"


def forget_stdin(folder: Path) -> None:
    """Delete the file that `receive_stdin` has written."""
    for path in folder.glob("stdin*"):
        discard(path)


def _ending(start: bytes) -> str:
    for magic, ending in ((b"PAR1", ".parquet"), (MAGIC, ".arrow"), (STREAM_MAGIC, ".arrows")):
        if start.startswith(magic):
            return ending
    for magic, ending in ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst")):
        if start.startswith(magic):
            return _text_ending(_unpacked(start, COMPRESSIONS[ending])) + ending
    return _text_ending(start)


def _text_ending(start: bytes) -> str:
    first = start.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
    if first in {b"{", b"["}:
        return ".json"
    line = start.split(b"\n", 1)[0]
    return ".tsv" if b"\t" in line and b'"' not in line else ".csv"


def _unpacked(start: bytes, compression: str) -> bytes:
    """Decompress the beginning of a text file, at most 1024 bytes. Returns empty bytes if it is damaged; the
    file's reader will report this.
    """
    try:
        with pa.CompressedInputStream(pa.BufferReader(start), compression) as stream:
            return bytes(stream.read(1024))
    except (OSError, pa.ArrowException):
        return b""
