"""Input files from paths, directories and globs, without files that rankmill itself wrote."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.part_names import part_of
from rankmill.producer.files.stores.paths import WORKSPACE, ObjectPath, as_path, resolved, workspace_of
from rankmill.producer.files.stores.reading import open_random

PARQUET = (".parquet", ".pq")
KINDS = (*PARQUET, ".csv", ".tsv", ".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")

_LEFT_BESIDE = re.compile(
    r"\.((parquet|pq|((csv|tsv|jsonl|ndjson|trec)(\.gz|\.zst)?))\.errors|ya?ml\.tuning)\.jsonl$",
    re.IGNORECASE,
)
"""Ends of the names of lists that commands write beside their output."""

_WORKSPACE_NAME = re.compile(
    r"\.(parquet|pq|(csv|tsv|jsonl|ndjson|trec)(\.gz|\.zst)?)\.rankmill$", re.IGNORECASE
)

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InputFile:
    """A file to read; ``partition`` holds ``(column, text)`` from folders such as ``date=2026-11-01``."""

    path: Path
    partition: tuple[tuple[str, str | None], ...] = ()

    @property
    def kind(self) -> str:
        """The ending that gives the file's format, without ``.gz`` or ``.zst``."""
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if suffixes and suffixes[-1] in COMPRESSED and not set(suffixes[-2:-1]) & set(PARQUET):
            suffixes.pop()
        return suffixes[-1] if suffixes else ""


def find_files(inputs: Sequence[str], output: str | None = None) -> tuple[InputFile, ...]:
    """Find the files for paths, directories (searched recursively) and globs, each in order.

    Files that rankmill itself wrote are left out: folders of interrupted runs, lists of row errors, records
    of `rankmill tune`, and an earlier `output` of the same command that a directory or glob contains.

    Raises
    ------
    InputError
        There are no files, or a file has a format that cannot be read.
    """
    found = [file for name in inputs for file in _found(name, inputs)]
    files = [file for file in found if not _is_left_behind(file.path)]
    named = {as_path(name) for name in inputs}
    kept = [file for file in files if file.path in named or not _is_output(file.path, output)]
    if not kept:
        raise InputError(f"{', '.join(inputs)}: holds only what rankmill itself has left there")
    if len(kept) < len(found):
        logger.info("left out of the input: %d files that rankmill itself wrote", len(found) - len(kept))
    for file in kept:
        if file.kind not in KINDS:
            raise InputError(f"{file.path}: cannot tell what is in it; its name must end in {_endings()}")
    return tuple(kept)


def stem(path: Path) -> str:
    """The file's name without the endings that give its format: ``a.b`` for ``a.b.csv.gz``."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).stem


def _found(name: str, inputs: Sequence[str]) -> Iterator[InputFile]:
    path = as_path(name)
    if isinstance(path, ObjectPath):
        files, root = _objects(path), path if path.is_dir() else _fixed_part(path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if InputFile(file).kind in KINDS and file.is_file())
        if not files:
            raise InputError(f"{name}: no file with one of the endings {_endings()} in this directory")
        root = path
    elif path.exists():
        files, root = [path], _common_folder(inputs)
    elif matches := sorted(glob.glob(name, recursive=True)):  # noqa: PTH207
        files, root = [Path(match) for match in matches if not Path(match).is_dir()], _fixed_part(path)
        if not files:
            raise InputError(f"{name}: only directories have such a name; add /*")
    else:
        raise InputError(f"{name}: no such file")
    for file in files:
        yield InputFile(file, _partition(file, root))


def _objects(path: ObjectPath) -> list[Path]:
    """The objects for a URL: of one, of a folder, or a glob."""
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        files = path.matches()
    else:
        files = [file for file in path.below() if InputFile(file).kind in KINDS]
    if not files:
        raise InputError(f"{path}: no such object, and none below it with one of the endings {_endings()}")
    return files


def _common_folder(inputs: Sequence[str]) -> Path:
    """The common folder of all files in `inputs`; a shell may have expanded them from a glob."""
    folders = [str(Path(name).parent) for name in inputs if Path(name).is_file()]
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:  # absolute and relative paths are mixed
        return Path()


def _fixed_part(pattern: Path) -> Path:
    """The folder of a glob above its first wildcard."""
    parts = list(pattern.parent.parts)
    wild = [number for number, part in enumerate(parts) if glob.has_magic(part)]
    return type(pattern)(*parts[: wild[0]]) if wild else pattern.parent


def _partition(path: Path, root: Path) -> tuple[tuple[str, str | None], ...]:
    """Columns from the names of the folders between `root` and the file, as Hive writes them."""
    try:
        folders = path.parent.relative_to(root).parts
    except ValueError:
        return ()
    pairs = [_printable(folder).partition("=") for folder in folders if "=" in folder.strip("=")]
    return tuple(
        (unquote(name), None if text == _NULL_PARTITION else unquote(text)) for name, _, text in pairs
    )


def _printable(name: str) -> str:
    """A file's name as text that can be encoded in UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _is_left_behind(path: Path) -> bool:
    folders = any(_is_workspace(parent) for parent in path.parents)
    return folders or bool(_LEFT_BESIDE.search(path.name))


def _is_workspace(folder: Path) -> bool:
    """Whether the folder is a run's; that of an output in parts is called for a folder."""
    of_parts = folder.suffix == WORKSPACE and (folder / "journal.db").exists()
    return of_parts or bool(_WORKSPACE_NAME.search(folder.name))


def _is_output(path: Path, output: str | None) -> bool:
    """Whether rankmill wrote the file: as `output`, or as the output of a run whose folder still exists.

    If the user's own file is at that path, it is an input, and the run ends with an error.
    """
    whole = resolved(path.parent if part_of(path.name) else path)
    asked = output is not None and whole == resolved(as_path(output))
    is_unfinished = workspace_of(whole).is_dir()
    if not (asked or is_unfinished):
        return False
    if InputFile(path).kind not in PARQUET:
        return is_unfinished  # text has no place for metadata
    try:
        return b"rankmill.version" in (pq.read_metadata(open_random(path)).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def _endings() -> str:
    return ", ".join(KINDS) + " (each except Parquet may be followed by .gz or .zst)"
