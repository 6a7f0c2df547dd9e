"""Looks up texts by id, in batches, in memory or in an index on disk.

An index on disk is a folder of files that are mapped into memory: the ids and texts as batches of Arrow, the
sorted hashes of the ids, and the row of each hash. So a look-up needs memory only for the texts that it
returns.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.cache import cache_folder, make_folder, strangers, temporary_folder
from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.jobs.contract.file_request import OnDuplicate
from rankmill.producer.files.corpus.texts import CORPUS, QUERIES, TextFields, read_texts, taken_fields
from rankmill.producer.files.ranking import taken
from rankmill.producer.files.stores.paths import INDEX, AnyPath, resolved
from rankmill.producer.files.stores.roots import confined
from rankmill.producer.files.stores.writing import sync

_FORMAT = 2
_SCHEMA = pa.schema({"id": pa.string(), "text": pa.string()})
_BATCH_BYTES = 64 << 20
"""The ids and texts of an index are stored in batches of about this many bytes. Smaller batches would make
look-ups slower, because each look-up visits all batches.
"""

logger = logging.getLogger(__name__)

_CHECKED_ROWS = 65_536

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


@dataclass
class TextIndex:
    """Finds texts by their ids.

    Parameters
    ----------
    batches
        The ids and the texts, in the columns ``id`` and ``text``.
    hashes
        The sorted hashes of all ids.
    rows
        For each hash, the row of its id. If an id has several rows, `find` returns the one that comes first
        here.
    """

    batches: Sequence[pa.RecordBatch]
    hashes: Hashes
    rows: Rows

    def find(self, ids: pa.Array) -> Rows:
        """Return the row number of each id, or -1 for an id that is not in the index."""
        wanted = _hashes(ids)
        order = np.argsort(wanted)  # numpy finds sorted hashes several times as fast
        places = np.empty(len(wanted), np.int64)
        places[order] = np.searchsorted(self.hashes, wanted[order])
        rows_found = np.full(len(wanted), -1, np.int64)
        undecided = np.arange(len(wanted))
        while len(undecided):  # repeats only if two different ids have the same hash
            undecided = undecided[places[undecided] < len(self.hashes)]
            undecided = undecided[self.hashes[places[undecided]] == wanted[undecided]]
            rows = np.asarray(self.rows[places[undecided]])
            same = np.asarray(pc.equal(self.ids(rows), ids.take(pa.array(undecided)))).astype(bool)
            rows_found[undecided[same]] = rows[same]
            undecided = undecided[~same]
            places[undecided] += 1
        return rows_found

    def ids(self, rows: Rows) -> pa.StringArray:
        """Return the id in each of these rows, all of which must exist."""
        return self._taken(rows, "id")

    def take(self, rows: Rows) -> pa.StringArray:
        """Return the text in each of these rows, or null for the row number -1."""
        is_there = rows >= 0
        places = pa.array(np.cumsum(is_there) - 1, mask=~is_there)
        return self._taken(rows[is_there], "text").take(places)

    def _taken(self, rows: Rows, name: str) -> pa.StringArray:
        if not len(rows):
            return pa.array([], pa.string())
        return taken([batch.select([name]) for batch in self.batches], rows)[name].combine_chunks()


def in_memory(
    files: Sequence[AnyPath], on_duplicate: OnDuplicate = "error", fields: TextFields = QUERIES
) -> TextIndex:
    """Read the ids and texts of files into an index in memory.

    Parameters
    ----------
    files
        The files of texts with ids.
    on_duplicate
        What to do with an id that has two different texts: raise an error, or take the first or the last
        text.
    fields
        The columns of the ids and the texts.

    Raises
    ------
    InputError
        A file cannot be read, or `on_duplicate` is ``"error"`` and an id has two different texts.
    """
    batches = [_batch(*part) for file in files for part in read_texts(file, fields)]
    hashes = np.concatenate([np.zeros(0, np.uint64), *(_hashes(batch["id"]) for batch in batches)])
    rows = _in_order(hashes, on_duplicate)
    index = TextIndex(batches, hashes[rows], rows)
    if on_duplicate == "error":
        _check_unique(index, files, fields)
    return index


def on_disk(
    files: Sequence[AnyPath],
    fingerprints: Iterable[str],
    on_duplicate: OnDuplicate = "error",
    fields: TextFields = CORPUS,
) -> TextIndex:
    """Open the index of a corpus on disk, and make it first if the files or the options are new.

    A new index is written beside the first file. In three cases it is written into the user's cache folder
    instead:

    - This process may not write beside the file.
    - The file is in an object store.
    - This process works for other users, who could put an index or a link beside the file.

    Parameters
    ----------
    files
        The files of texts with ids.
    fingerprints
        For each file, a text that changes when the file changes.
    on_duplicate
        What to do with an id that has two different texts: raise an error, or take the first or the last
        text.
    fields
        The columns of the ids and the texts.

    Raises
    ------
    InputError
        A file cannot be read, or `on_duplicate` is ``"error"`` and an id has two different texts. Or other
        users can write to the cache folder.
    OutputError
        The index cannot be written.
    """
    facts: dict[str, object] = {"format": _FORMAT, "files": [[str(resolved(file)), mark] for file, mark in
                                          zip(files, fingerprints, strict=True)]}  # fmt: skip
    facts |= {"on_duplicate": on_duplicate, "fields": [str(taken_fields(file, fields)) for file in files]}
    facts |= {"columns": list(fields.columns)} if fields.columns else {}
    name = hashlib.sha256(str(resolved(files[0])).encode()).hexdigest()[:16]
    cache = cache_folder("auto")
    kept = cache / "corpora" / name
    first = files[0]
    beside = first.with_name(first.name + INDEX) if isinstance(first, Path) and not confined() else kept
    for folder in (beside, kept):
        if _about(folder) == facts:
            _check_owners(folder, kept, cache)
            return _open(folder)
    folder = beside if os.access(beside.parent, os.W_OK) else kept
    _check_owners(folder, kept, cache)
    try:
        make_folder(folder.parent)
        with temporary_folder(f".{folder.name}-", folder.parent) as making:
            new = making / "index"
            new.mkdir(mode=0o700)
            _build(new, files, on_duplicate, fields)
            (new / "about.json").write_text(json.dumps(facts))
            if _about(folder) == facts:  # another process was quicker; deleting breaks reads on NFS
                return _open(folder)
            index = _open(new)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another process may have moved its own index there just now
                new.rename(folder)
            return index
    except OSError as error:
        raise OutputError(f"cannot write the corpus' index {folder}: {error.strerror}") from None


def _check_owners(folder: Path, kept: Path, cache: Path) -> None:
    """Raise `InputError` if the index is in the cache folder and other users could change it there."""
    if folder == kept and (why := strangers(kept, cache, "XDG_CACHE_HOME")):
        raise InputError(why)


def _about(folder: Path) -> object:
    try:
        return json.loads((folder / "about.json").read_text())
    except (OSError, ValueError):
        return None


def _build(folder: Path, files: Sequence[AnyPath], on_duplicate: OnDuplicate, fields: TextFields) -> None:
    hashes = [np.zeros(0, np.uint64)]
    held: list[pa.RecordBatch] = []
    with pa.ipc.new_stream(folder / "texts", _SCHEMA) as stream:
        for file in files:
            for part in read_texts(file, fields):
                held.append(_batch(*part))
                hashes.append(_hashes(held[-1]["id"]))
                if sum(batch.nbytes for batch in held) >= _BATCH_BYTES:
                    stream.write_batch(pa.concat_batches(held))
                    held = []
                    logger.info("indexing %s: %s texts", file, f"{sum(map(len, hashes)):,}")
        for batch in held:
            stream.write_batch(batch)
    every = np.concatenate(hashes)
    rows = _in_order(every, on_duplicate)
    # numpy's `tofile` does not notice that the disk refuses the last bytes
    (folder / "hashes").write_bytes(every[rows].data)
    (folder / "rows").write_bytes(rows.data)
    for name in ("texts", "hashes", "rows"):
        sync(folder / name)
    if on_duplicate == "error":
        _check_unique(_open(folder), files, fields)


def _open(folder: Path) -> TextIndex:
    with pa.memory_map(str(folder / "texts")) as texts, pa.ipc.open_stream(texts) as stream:
        batches = list(stream)
    if not any(map(len, batches)):  # an empty file cannot be mapped
        return TextIndex(batches, np.zeros(0, np.uint64), np.zeros(0, np.int64))
    hashes, rows = np.memmap(folder / "hashes", np.uint64, "r"), np.memmap(folder / "rows", np.int64, "r")
    return TextIndex(batches, hashes, rows)


def _batch(ids: pa.StringArray, texts: pa.StringArray) -> pa.RecordBatch:
    return pa.record_batch([ids, texts], schema=_SCHEMA)


def _hashes(ids: pa.Array) -> Hashes:
    values = ids.to_numpy(zero_copy_only=False)
    return pd.util.hash_array(values.astype(object), categorize=False)


def _in_order(hashes: Hashes, on_duplicate: OnDuplicate) -> Rows:
    """Sort all row numbers by hash. Of equal hashes, the row that `on_duplicate` keeps comes first."""
    if on_duplicate != "last":
        return np.argsort(hashes, kind="stable")
    return len(hashes) - 1 - np.argsort(hashes[::-1], kind="stable")


def _check_unique(index: TextIndex, files: Sequence[AnyPath], fields: TextFields) -> None:
    """Raise `InputError` if an id has two different texts in the files."""
    equal = index.hashes[1:] == index.hashes[:-1]
    if not equal.any():
        return
    rows = np.sort(index.rows[np.r_[equal, False] | np.r_[False, equal]])
    for start in range(0, len(rows), _CHECKED_ROWS):
        some = rows[start : start + _CHECKED_ROWS]
        ids = index.ids(some)
        firsts = index.find(ids)
        texts, theirs = index.take(firsts), index.take(some)
        same = pc.or_(
            pc.fill_null(pc.equal(texts, theirs), False), pc.and_(texts.is_null(), theirs.is_null())
        )
        for place in np.flatnonzero(~np.asarray(same).astype(bool))[:1]:
            names = [_place_of(int(row), files, fields) for row in (firsts[place], some[place])]
            raise InputError(
                f"id {ids[int(place)].as_py()!r} has two texts: in {names[0]} and in {names[1]}; "
                "keep one, or say which with --on-duplicate first or last"
            )


def _place_of(row: int, files: Sequence[AnyPath], fields: TextFields) -> str:
    """Name a row's file, and the row's number there. If each file has 5 rows, row 7 is row 2 of the second
    file.
    """
    for file in files:
        rows = sum(len(ids) for ids, _ in read_texts(file, fields))
        if row < rows:
            break
        row -= rows
    return f"row {row} (counted from 0) of {file}"
