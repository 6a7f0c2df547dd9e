"""Unpacks an uploaded model: a tar archive that anybody may have made becomes a folder, within limits."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.registry.documents import MAX_FILES, check_path
from rankmill.jobs.registry.registry import PIECE
from rankmill.registry.push import check_kind, is_left_out

_MOST_ENTRIES = 4 * MAX_FILES
"""Most files and folders of an archive, those that are left out included."""

_MOST_HEADER = 16 << 10
"""Most bytes of a name, or of what else an archive says of a file; they are read into memory."""

_HEADERS = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
     tarfile.GNUTYPE_LONGLINK}
)  # fmt: skip

_NO_ARCHIVE = "this is no tar archive, or a part of one: send the output of tar c -C MODEL_FOLDER ."


class Source(Protocol):
    """What an archive is read from."""

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""


def unpack(source: Source, folder: Path) -> Path:
    """Unpack the files of a model; returns the folder with its ``config.json``.

    That is `folder`, or the only folder in it. Hidden files are left out, as by ``rankmill models push``.

    Raises
    ------
    InputError
        The archive is not whole, or has a link, a path that leads out of it, too many files, or a file that
        is not pushed.
    OSError
        A file cannot be written.
    """
    folder.mkdir()
    is_whole = False

    class Entry(tarfile.TarInfo):
        """Limits what is read into memory, and sees the end of the archive."""

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            nonlocal is_whole
            is_whole = is_whole or (len(buf) == tarfile.BLOCKSIZE and not any(buf))
            found = super().frombuf(buf, encoding, errors)
            if found.type == tarfile.GNUTYPE_SPARSE or found.size < 0:
                raise InputError(_NO_ARCHIVE + ", without --sparse")
            if found.type in _HEADERS and found.size > _MOST_HEADER:
                raise InputError(f"the archive has a name or comment of {found.size:,} bytes")
            return found

        def _proc_gnusparse_10(self, *args: Any) -> None:
            raise InputError(_NO_ARCHIVE + ", without --sparse")

    try:
        # tarfile asks for nothing but read()
        with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r|", tarinfo=Entry) as archive:
            for count, entry in enumerate(archive):
                if count >= _MOST_ENTRIES:
                    raise InputError(f"the archive has over {_MOST_ENTRIES:,} files and folders")
                _unpack_entry(archive, entry, folder)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError):
        raise InputError(_NO_ARCHIVE) from None
    if not is_whole:
        raise InputError(_NO_ARCHIVE)
    while source.read(PIECE):
        pass  # tar fills its last record
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
        return  # made with its first file
    if not entry.isreg() or entry.issparse():
        raise InputError(f"{name} is a link or no file; a model has files and folders only")
    check_kind(Path(name))
    target = folder / name
    opened = archive.extractfile(entry)
    assert opened  # it is a file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened, target.open("xb") as out:
            shutil.copyfileobj(opened, out, PIECE)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{name} is twice in the archive, as a file or as a folder") from None
    if target.stat().st_size != entry.size:
        raise InputError(_NO_ARCHIVE)
