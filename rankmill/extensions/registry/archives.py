"""Unpacks uploaded tar archives of models, without trusting them, and packs versions into tar archives."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from rankmill.extensions.registry.documents import MAX_FILES, Manifest, ModelFile, check_path
from rankmill.extensions.registry.folder import PIECE
from rankmill.extensions.registry.push import check_kind, is_left_out
from rankmill.jobs.contract.errors import InputError

_MOST_ENTRIES = 4 * MAX_FILES
"""Uploaded archives with more files and folders than this are refused."""

_MOST_HEADER = 16 << 10
"""Uploaded archives with a header of more bytes, such as a long file name, are refused: tarfile reads headers
into memory.
"""

_HEADERS = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
     tarfile.GNUTYPE_LONGLINK}
)  # fmt: skip

_NO_ARCHIVE = "this is not a tar archive, or only a part of one: send the output of tar c -C MODEL_FOLDER ."


def unpack(source: Any, folder: Path) -> Path:
    """Unpack a model's archive into the new folder `folder`, without hidden files.

    `source` is an upload or a file; only its method `read` is called. Returns the folder with the model's
    files. If the archive has a single folder at its top, that folder is returned, otherwise `folder`.

    Raises
    ------
    InputError
        The archive is incomplete, or has a link, a path that leads out of it, too many files, or a file that
        cannot be pushed.
    OSError
        A file cannot be written.
    """
    folder.mkdir()
    is_whole = False

    class Entry(tarfile.TarInfo):
        """Reads the header of each file in the archive. Refuses sparse files and long headers, and sets
        `is_whole` at the end of the archive.
        """

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            nonlocal is_whole
            is_whole = is_whole or (len(buf) == tarfile.BLOCKSIZE and not any(buf))
            member = super().frombuf(buf, encoding, errors)
            if member.type == tarfile.GNUTYPE_SPARSE or member.size < 0:
                raise InputError(_NO_ARCHIVE + ", without --sparse")
            if member.type in _HEADERS and member.size > _MOST_HEADER:
                raise InputError(
                    f"the archive has a name or comment of {member.size:,} bytes: at most {_MOST_HEADER:,}"
                )
            return member

        def _proc_gnusparse_10(self, *args: Any) -> None:
            raise InputError(_NO_ARCHIVE + ", without --sparse")

    try:
        with tarfile.open(fileobj=source, mode="r|", tarinfo=Entry) as archive:
            for count, entry in enumerate(archive):
                if count >= _MOST_ENTRIES:
                    raise InputError(
                        f"the archive has over {_MOST_ENTRIES:,} files and folders: leave some out"
                    )
                _unpack_entry(archive, entry, folder)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError):
        raise InputError(_NO_ARCHIVE) from None
    if not is_whole:
        raise InputError(_NO_ARCHIVE)
    while source.read(PIECE):
        pass  # read the rest, because tar fills its last record with zeros
    inside = list(folder.iterdir())
    alone = len(inside) == 1 and inside[0].is_dir()
    return inside[0] if alone else folder


def _unpack_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> None:
    name = entry.name.removeprefix("./").rstrip("/")
    if name in {"", "."} or any(is_left_out(part) for part in name.split("/") if part not in {".", ".."}):
        return
    try:
        check_path(name)
    except ValueError as error:
        raise InputError(f"the archive: {error}") from None
    if entry.isdir():
        return  # a folder is made with its first file
    if not entry.isreg() or entry.issparse():
        raise InputError(f"{name} is a link, or is not a file; a model has only files and folders")
    check_kind(Path(name))
    target = folder / name
    opened = archive.extractfile(entry)
    assert opened  # not None, because the entry is a file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened, target.open("xb") as out:
            shutil.copyfileobj(opened, out, PIECE)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{name} is twice in the archive, as a file or as a folder") from None
    if target.stat().st_size != entry.size:
        raise InputError(_NO_ARCHIVE)


class ModelArchive:
    """Streams the files of a version as a tar archive.

    Parameters
    ----------
    manifest
        The manifest of the version.
    folder
        The folder with the version's files.
    held
        Keeps `folder` on the disk. `pieces` closes `held` after the last piece, or when the reader stops.
    """

    def __init__(self, manifest: Manifest, folder: Path, held: ExitStack) -> None:
        self._folder = folder
        self._held = held
        self._entries = [(file, _head(file, int(manifest.at))) for file in manifest.files]
        self._end = bytes(2 * tarfile.BLOCKSIZE)

    @property
    def size(self) -> int:
        entries = sum(len(head) + file.bytes + _gap(file.bytes) for file, head in self._entries)
        return entries + len(self._end)

    def pieces(self) -> Iterator[bytes]:
        with self._held:
            for file, head in self._entries:
                yield head
                with (self._folder / file.path).open("rb") as source:
                    while piece := source.read(PIECE):
                        yield piece
                yield bytes(_gap(file.bytes))
            yield self._end


def _head(file: ModelFile, at: int) -> bytes:
    info = tarfile.TarInfo(file.path)
    info.size, info.mtime = file.bytes, at
    return info.tobuf(tarfile.PAX_FORMAT)


def _gap(size: int) -> int:
    """Return how many zero bytes tar appends to a file of `size` bytes."""
    return -size % tarfile.BLOCKSIZE
