"""Moves complete local files to their places. Either a file appears there as a whole, and survives a power
failure, or it does not appear at all.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankmill.jobs.cache import temporary_folder
from rankmill.jobs.contract.errors import OutputError
from rankmill.jobs.system import system
from rankmill.producer.files.stores.own_folder import OwnFolder
from rankmill.producer.files.stores.paths import WORK_SECONDS, AnyPath, ObjectPath
from rankmill.producer.files.stores.reading import ObjectReader
from rankmill.producer.files.stores.roots import held, opened_folder

_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "memory"}
"""Schemes of the URLs of stores in which an object appears only when its upload is complete."""

_IN_PIECES = {"s3", "s3a"}
"""Schemes of the URLs of stores to which s3fs uploads an object in pieces. Do not let s3fs choose the size of
the pieces and how many it uploads at once: it would hold ten pieces of 50 MiB in memory.
"""

_PIECE_BYTES, _MOST_PIECES = 16 << 20, 10_000
"""An object is uploaded to S3 in pieces of this many bytes. S3 accepts at most `_MOST_PIECES` pieces, so the
pieces of a very large object are larger.
"""

_PIECES_AT_ONCE = 4

_UNFINISHED = ".rankmill-*"
"""Names of the folders in which files are written before they are moved. A process that dies leaves its
folder behind.
"""

logger = logging.getLogger(__name__)


@contextmanager
def folder_of(target: AnyPath) -> Iterator[AnyPath]:
    """Yield a path to the folder of a file. The folder is made if necessary.

    In a process that works for other users, the path leads to this folder until the block ends, even if the
    folder's name leads elsewhere by then.

    Raises
    ------
    RunnerError
        This process may not write in the folder.
    OSError
        The folder cannot be made or opened.
    """
    if isinstance(target, ObjectPath):
        yield target.parent
        return
    if not target.parent.exists():  # for a part: its folder may not exist yet
        with opened_folder(target.parent.parent, target, target.parent.name) as above:
            os.mkdir(target.parent.name, dir_fd=above)
            system.fsync(above)
    with opened_folder(target.parent, target) as folder:
        yield held(folder, target.parent)


def put(file: Path, target: AnyPath, folder: AnyPath | None = None) -> None:
    """Move a synced file to `target`, in place of any file there.

    Parameters
    ----------
    file, target
        The file, and its new path.
    folder
        The folder of `target`, from `folder_of`. With ``None``, the folder is made if it does not exist.

    Raises
    ------
    OSError, StoreError
        The file cannot be written.
    OutputError
        The file is in its place, but may not stay there after a power failure.
    RunnerError
        This process may not write in the folder of `target`.
    """
    if isinstance(target, ObjectPath):
        target.ask(lambda system, name: _send(system, name, file, target), WORK_SECONDS, "cannot write ")
        discard(file)
        return
    if not isinstance(folder, Path):
        with folder_of(target) as made:
            put(file, target, made)
        return
    with opened_folder(folder, target) as opened:
        os.replace(file, target.name, dst_dir_fd=opened)
        _confirm(opened, target)


@contextmanager
def whole_file(target: AnyPath) -> Iterator[Path]:
    """Yield the path of a file on this host to write. If the block ends without an error, the file is moved
    to `target`.

    Raises
    ------
    OutputError
        The file cannot be written.
    StoreError
        The store of `target` does not accept the file.
    RunnerError
        This process may not write in the folder of `target`.
    """
    with as_output_error(target), _private_folder(target) as folder:
        partial = folder / target.name
        yield partial
        sync(partial)
        put(partial, target)


@contextmanager
def as_output_error(path: AnyPath) -> Iterator[None]:
    """Raise errors of the system and of Arrow as an `OutputError` that names `path`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        number = getattr(error, "errno", None)
        raise OutputError(f"cannot write {path}: {os.strerror(number) if number else error}") from None


@contextmanager
def _private_folder(target: AnyPath) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end of the block. The folder is beside `target`, or in the
    system's folder for temporary files if `target` is an object.
    """
    if not isinstance(target, Path):
        with temporary_folder("rankmill-upload-") as temporary:
            yield temporary
        return
    name = _UNFINISHED.replace("*", secrets.token_hex(8))
    with closing(OwnFolder(target.parent / name, target)) as folder:
        try:
            yield folder.inside
        finally:
            with suppress(OSError):
                folder.remove()


def _confirm(folder: int, target: Path) -> None:
    try:
        system.fsync(folder)
    except OSError as error:
        raise OutputError(
            f"{target} is complete and in its place, but the disk does not confirm that it stays there "
            f"({error.strerror or error}): look after the disk"
        ) from None


def delete(files: Iterable[AnyPath], folder: AnyPath) -> None:
    """Delete files of a folder, if they exist, so that they stay deleted after a power failure.

    Raises
    ------
    RunnerError
        This process may not write in the folder.
    OSError, StoreError
        A file cannot be deleted.
    """
    if isinstance(folder, ObjectPath):
        for file in files:
            file.unlink(missing_ok=True)
    elif present := [file.name for file in files if os.path.lexists(folder / file.name)]:
        with opened_folder(folder, folder) as opened:
            for name in present:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=opened)
            system.fsync(opened)


def clear_unfinished(folder: AnyPath) -> None:
    """Delete all unfinished files in a folder of this host. Raises the errors of `opened_folder`. Call this
    only when no process writes in the folder.
    """
    if isinstance(folder, Path):
        with opened_folder(folder, folder) as opened:
            for name in fnmatch.filter(os.listdir(opened), _UNFINISHED):  # noqa: PTH208 -- as in OwnFolder
                try:
                    os.unlink(name, dir_fd=opened)
                except OSError:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=opened)


def discard(file: Path) -> None:
    """Delete a file that is no longer needed, if it exists; a failure is only logged."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more, and cannot be removed: %s", file, error.strerror or error)


def identity(path: AnyPath, place: AnyPath) -> str:
    """Return a text by which a complete file can be recognized after it was moved to its place.

    The file is at `path` now, and `place` is its final place. If both are on this host, the text has the
    file's inode, size and time. If one of them is in a store, the text is the file's `content`.
    """
    if not (isinstance(place, Path) and isinstance(path, Path)):
        return content(path)
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def content(path: AnyPath) -> str:
    """The size and the digest of a file's or an object's bytes."""
    with ObjectReader(path) if isinstance(path, ObjectPath) else path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return f"{file.tell()} {digest.hexdigest()}"


def sync(path: Path) -> None:
    """Sync a file to disk. If `path` is a folder, sync the list of the files in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        system.fsync(descriptor)
    finally:
        os.close(descriptor)


def _send(system: Any, name: str, file: Path, target: ObjectPath) -> None:
    if target.protocol in _IN_PIECES:
        piece = max(_PIECE_BYTES, -(-file.stat().st_size // _MOST_PIECES))
        options = {"chunksize": piece, "max_concurrency": _PIECES_AT_ONCE}
        try:
            system.put_file(str(file), name, **options)
        except FileNotFoundError:
            # Send the file once more. The store's answer that the upload is complete may have been lost. The
            # library then repeats its last request, and the store no longer knows the upload. If the bucket
            # does not exist, sending fails again.
            system.put_file(str(file), name, **options)
    elif target.protocol in _WHOLE:
        system.put_file(str(file), name)
    else:
        partial = target.with_name(f".{target.name}.partial").store[1]
        system.makedirs(target.parent.store[1], exist_ok=True)
        system.put_file(str(file), partial)
        system.mv(partial, name)
    system.invalidate_cache(name)
    size = system.info(name)["size"]
    if size != file.stat().st_size:
        raise OSError(f"{size:,} bytes are there of {file.stat().st_size:,}")
