"""Looks up texts by id, in batches, in memory or in an index on disk.

An index holds the ids and texts of a corpus as Arrow arrays, and the sorted hashes of the ids, each in a file
that is mapped into memory. So a look-up needs memory only for the texts that it returns.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.cache import cache_folder, make_folder, strangers
from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.jobs.contract.file_request import OnDuplicate
from rankmill.producer.files.corpus.texts import CORPUS, QUERIES, TextFields, read_texts, taken_fields
from rankmill.producer.files.stores.paths import AnyPath, resolved
from rankmill.producer.files.stores.roots import confined
from rankmill.producer.files.stores.writing import sync

SUFFIX = ".index.rankmill"
"""Suffix of the folder of an index, which is added to the name of the corpus."""

_FORMAT = 1
_RELEASE_BYTES = 256 << 20
"""Bytes of texts after which mapped memory is given back to the system."""

logger = logging.getLogger(__name__)

_CHECKED_ROWS = 65_536

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


@dataclass
class TextIndex:
    """Finds texts by id; ``hashes`` are the sorted hashes of the ids, and ``rows`` the row of each hash.

    If several rows have the same id, `find` returns the one that comes first in ``rows``.
    """

    ids: pa.LargeStringArray
    texts: pa.LargeStringArray
    hashes: Hashes
    rows: Rows
    maps: list[mmap.mmap] = field(default_factory=list)
    _touched: int = 0

    def find(self, ids: pa.Array) -> Rows:
        """The rows of the given ids (strings); -1 for an id that the index does not have."""
        wanted = _hashes(ids)
        order = np.argsort(wanted)  # sorted ids are found several times as fast
        places = np.empty(len(wanted), np.int64)
        places[order] = np.searchsorted(self.hashes, wanted[order])
        found = np.full(len(wanted), -1, np.int64)
        left = np.arange(len(wanted))
        while len(left):  # repeats only where two ids have the same hash
            left = left[places[left] < len(self.hashes)]
            left = left[self.hashes[places[left]] == wanted[left]]
            rows = np.asarray(self.rows[places[left]])
            same = np.asarray(
                pc.equal(self.ids.take(pa.array(rows)), ids.take(pa.array(left)).cast(pa.large_string()))
            ).astype(bool)
            found[left[same]] = rows[same]
            left = left[~same]
            places[left] += 1
        return found

    def take(self, rows: Rows) -> pa.StringArray:
        """The texts of rows; null for -1."""
        texts = self.texts.take(pa.array(rows, mask=rows < 0)).cast(pa.string())
        self._touched += texts.nbytes
        if self._touched > _RELEASE_BYTES:
            self._touched = 0
            for each in self.maps:
                each.madvise(mmap.MADV_DONTNEED)
        return texts


def in_memory(
    files: Sequence[AnyPath], on_duplicate: OnDuplicate = "error", fields: TextFields = QUERIES
) -> TextIndex:
    """Read all texts of `files` into memory; `fields` names the columns.

    An id may occur twice with the same text. If the texts differ, `on_duplicate` raises an error, or takes
    the first or the last text.

    Raises
    ------
    InputError
        A file cannot be read, or an id has two texts.
    """
    by_file = [list(read_texts(file, fields)) for file in files]
    parts = [part for each in by_file for part in each]
    ids = pa.concat_arrays([part.cast(pa.large_string()) for part, _ in parts] or [_no_texts()])
    texts = pa.concat_arrays([part.cast(pa.large_string()) for _, part in parts] or [_no_texts()])
    hashes = _hashes(ids)
    rows = _in_order(hashes, on_duplicate)
    index = TextIndex(ids, texts, hashes[rows], rows)
    if on_duplicate == "error":
        _check_unique(index, files, [sum(len(part[0]) for part in each) for each in by_file])
    return index


def on_disk(
    files: Sequence[AnyPath],
    fingerprints: Iterable[str],
    on_duplicate: OnDuplicate = "error",
    fields: TextFields = CORPUS,
) -> TextIndex:
    """Open the index beside the first file of a corpus if it fits files and `fields`, else make a new one.

    Ids that occur twice are treated as in `in_memory`. If the folder of the first file cannot be written, or
    is in an object store, the index is in the user's cache folder.

    Raises
    ------
    InputError
        A file cannot be read, an id has two texts, or strangers can write to the cache folder.
    OutputError
        The index cannot be written.
    """
    about: dict[str, object] = {"format": _FORMAT, "files": [[str(resolved(file)), mark] for file, mark in
                                          zip(files, fingerprints, strict=True)]}  # fmt: skip
    about |= {"on_duplicate": on_duplicate, "fields": [str(taken_fields(file, fields)) for file in files]}
    about |= {"columns": list(fields.columns)} if fields.columns else {}
    name = hashlib.sha256(str(resolved(files[0])).encode()).hexdigest()[:16]
    cache = cache_folder("auto")
    kept = cache / "corpora" / name
    first = files[0]
    beside = first.with_name(first.name + SUFFIX) if isinstance(first, Path) else kept
    for folder in (beside, kept):
        if _about(folder) == about:
            _check_owners(folder, kept, cache)
            return _open(folder)
    roots = confined()
    may_write = os.access(beside.parent, os.W_OK) and (roots is None or roots.allow(first, "write"))
    folder = beside if may_write else kept
    _check_owners(folder, kept, cache)
    try:
        make_folder(folder.parent)
        new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=SUFFIX, dir=folder.parent))
        try:
            _build(new, files, on_duplicate, fields)
            (new / "about.json").write_text(json.dumps(about))
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(FileExistsError):
                new.rename(folder)
            return _open(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"cannot write the corpus' index {folder}: {error.strerror}") from None


def _check_owners(folder: Path, kept: Path, cache: Path) -> None:
    """Check that no other user can write an index in the cache folder; one beside the corpus is as safe as
    that.
    """
    if folder == kept and (why := strangers(kept, cache, "XDG_CACHE_HOME")):
        raise InputError(why)


def _about(folder: Path) -> object:
    try:
        return json.loads((folder / "about.json").read_text())
    except (OSError, ValueError):
        return None


def _build(folder: Path, files: Sequence[AnyPath], on_duplicate: OnDuplicate, fields: TextFields) -> None:
    hashes: list[Hashes] = []
    sizes: list[int] = []
    with _Strings(folder, "ids") as ids, _Strings(folder, "texts") as texts:
        for file in files:
            for some_ids, some_texts in read_texts(file, fields):
                hashes.append(_hashes(some_ids))
                ids.add(some_ids)
                texts.add(some_texts)
                if len(hashes) % 50 == 0:
                    logger.info("indexing %s: %s texts", file, f"{ids.count:,}")
            sizes.append(ids.count - sum(sizes))
    every = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
    rows = _in_order(every, on_duplicate)
    every[rows].tofile(folder / "hashes")
    rows.tofile(folder / "rows")
    for name in ("ids", "texts", "hashes", "rows"):
        for path in folder.glob(f"{name}*"):
            sync(path)
    if on_duplicate == "error":
        _check_unique(_open(folder), files, sizes)


def _open(folder: Path) -> TextIndex:
    maps: list[mmap.mmap] = []

    def mapped(name: str) -> pa.Buffer:
        path = folder / name
        if not path.stat().st_size:
            return pa.py_buffer(b"")
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return pa.py_buffer(maps[-1])

    hashes: Hashes = np.frombuffer(mapped("hashes"), np.uint64)
    rows: Rows = np.frombuffer(mapped("rows"), np.int64)
    strings = [
        pa.LargeStringArray.from_buffers(
            len(hashes), mapped(f"{name}.ends"), mapped(f"{name}.bytes"), mapped(f"{name}.valid")
        )
        for name in ("ids", "texts")
    ]
    return TextIndex(strings[0], strings[1], hashes, rows, maps)


class _Strings:
    """Writes an Arrow array of strings to files: its data, the end of each string, and which are null."""

    def __init__(self, folder: Path, name: str) -> None:
        self._data = (folder / f"{name}.bytes").open("wb")
        self._ends = (folder / f"{name}.ends").open("wb")
        self._valid_path = folder / f"{name}.valid"
        self._valid: list[npt.NDArray[np.uint8]] = []
        self._size = 0
        self.count = 0
        self._ends.write(np.zeros(1, np.int64).tobytes())

    def add(self, texts: pa.StringArray) -> None:
        """Append strings."""
        self._valid.append(np.asarray(pc.is_valid(texts)).astype(np.uint8))
        if not len(texts):
            return
        whole = pc.fill_null(texts, "")
        _, ends, data = whole.buffers()
        places = np.frombuffer(ends, np.int32)[whole.offset :][: len(whole) + 1].astype(np.int64)
        self._ends.write((self._size + places[1:] - places[0]).tobytes())
        size = int(places[-1] - places[0])
        if size:
            self._data.write(data.slice(int(places[0]), size))
        self._size += size
        self.count += len(texts)

    def __enter__(self) -> _Strings:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()
        self._ends.close()
        flags = np.concatenate(self._valid) if self._valid else np.zeros(0, np.uint8)
        self._valid_path.write_bytes(np.packbits(flags, bitorder="little").tobytes())


def _hashes(ids: pa.Array) -> Hashes:
    values = ids.to_numpy(zero_copy_only=False)
    return pd.util.hash_array(values.astype(object), categorize=False)


def _in_order(hashes: Hashes, on_duplicate: OnDuplicate) -> Rows:
    """The rows in the order of their hashes; of equal hashes, the row to take comes first."""
    if on_duplicate != "last":
        return np.argsort(hashes, kind="stable")
    return len(hashes) - 1 - np.argsort(hashes[::-1], kind="stable")


def _check_unique(index: TextIndex, files: Sequence[AnyPath], sizes: Sequence[int]) -> None:
    """Raise `InputError` if an id has two texts; `sizes` are the numbers of rows of the files."""
    equal = index.hashes[1:] == index.hashes[:-1]
    if not equal.any():
        return
    rows = np.sort(index.rows[np.r_[equal, False] | np.r_[False, equal]])
    for start in range(0, len(rows), _CHECKED_ROWS):
        some = rows[start : start + _CHECKED_ROWS]
        firsts = index.find(index.ids.take(pa.array(some)).cast(pa.string()))
        texts, theirs = index.take(firsts), index.take(some)
        same = pc.or_(
            pc.fill_null(pc.equal(texts, theirs), False), pc.and_(texts.is_null(), theirs.is_null())
        )
        for place in np.flatnonzero(~np.asarray(same).astype(bool))[:1]:
            names = [_place_of(int(row), files, sizes) for row in (firsts[place], some[place])]
            raise InputError(
                f"id {index.ids[int(some[place])].as_py()!r} has two texts: in {names[0]} and in {names[1]}; "
                "keep one, or say which with --on-duplicate first or last"
            )


def _place_of(row: int, files: Sequence[AnyPath], sizes: Sequence[int]) -> str:
    """The file of a row, and its number there, for messages; `row` counts the rows of all files."""
    file = int(np.searchsorted(np.cumsum(sizes), row, side="right"))
    return f"row {row - sum(sizes[:file])} (counted from 0) of {files[file]}"


def _no_texts() -> pa.LargeStringArray:
    return pa.array([], pa.large_string())
