"""Putting a complete local file where it belongs: it is there as a whole, and to stay, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from rankmill.jobs.contract.errors import OutputError
from rankmill.producer.files.stores.paths import ObjectPath
from rankmill.producer.files.stores.patience import WORK_SECONDS, patiently
from rankmill.producer.files.stores.reading import ObjectReader
from rankmill.producer.files.stores.roots import check_opened
from rankmill.producer.files.stores.upload import Upload

_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "memory"}
"""Stores in which an object appears when its upload is complete."""

_READ_BYTES = 4 << 20

logger = logging.getLogger(__name__)


def put(file: Path, target: Path, upload: Upload | None = None) -> None:
    """Move a synced file to `target`, which is replaced; its folder is created if it is not there.

    Parameters
    ----------
    file, target
        The file, and where it is to be.
    upload
        What has sent the beginning of the file to a store.

    Raises
    ------
    OSError, StoreError
        It cannot be written.
    OutputError
        It is in its place, but may not stay there.
    RunnerError
        Its folder is outside of the roots.
    """
    if isinstance(target, ObjectPath):
        patiently(f"cannot write {target}", lambda: _send(file, target, upload), WORK_SECONDS)
        discard(file)
        return
    if not target.parent.exists():  # of parts
        target.parent.mkdir()
        sync(target.parent.parent)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_opened(folder, target, "write")
        os.replace(file, target.name, dst_dir_fd=folder)
        _confirm(folder, target)
    finally:
        os.close(folder)


def _confirm(folder: int, target: Path) -> None:
    """Sync the folder in which `target` is now."""
    try:
        os.fsync(folder)
    except OSError as error:
        raise OutputError(
            f"{target} is complete and in its place, but the disk does not confirm that it stays there "
            f"({error.strerror or error}): look after the disk"
        ) from None


def discard(file: Path) -> None:
    """Delete a file that is not needed any more, if it is there; a failure is only logged."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more, and cannot be removed: %s", file, error.strerror or error)


def identity(path: Path, *, in_store: bool) -> str:
    """What a complete file keeps when it is put into place: inode, size, time; in a store size and digest."""
    if not in_store:
        found = path.stat()
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"
    digest, size = hashlib.sha256(), 0
    with ObjectReader(path) if isinstance(path, ObjectPath) else path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            size += len(data)
    return f"{size} {digest.hexdigest()}"


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _send(file: Path, target: ObjectPath, upload: Upload | None) -> None:
    system, name = target.store
    if upload and upload.finish():
        pass
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
