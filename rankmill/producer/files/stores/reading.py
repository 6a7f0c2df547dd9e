"""Reads files and objects; objects are read ahead in blocks, and a block that failed is read again."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.system import system
from rankmill.producer.files.stores.paths import WORK_SECONDS, AnyPath, ObjectPath, patiently
from rankmill.producer.files.stores.roots import check_opened, confined

_BLOCK_BYTES = 4 << 20
_AHEAD = 2
"""While a block of an object is read, this many of the following blocks are fetched."""

_DIGESTED_BYTES = 64 << 10

_VERSIONS = ("ETag", "etag", "VersionId", "version_id", "generation", "blob_id", "md5", "sha256")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")

_KEPT = 16
"""At most this many blocks of an object are held in memory. Blocks that were read are kept, because a row
group of Parquet is read in several places.
"""


def open_stream(path: AnyPath) -> pa.NativeFile:
    """Open a file as a stream, decompressed if its name ends in a compression.

    Raises
    ------
    InputError
        The file has 0 bytes, or is not a file; or the object does not exist.
    OSError
        The file of this host cannot be opened.
    StoreError, RunnerError
        The store does not serve, or this process may not read the file.
    """
    try:
        compression = str(pa.Codec.detect(path.name.lower()).name)
    except (ValueError, TypeError):  # the name does not end in a compression
        compression = None
    with _not_empty(path) as source:
        return pa.input_stream(source, compression=compression)


@contextmanager
def _not_empty(path: AnyPath) -> Iterator[Path | ObjectReader]:
    """Yield what to open. Raises `InputError` if the file or object has 0 bytes."""
    opened: AbstractContextManager[Path | ObjectReader]
    opened = nullcontext(ObjectReader(path)) if isinstance(path, ObjectPath) else admitted(path)
    with opened as source:
        if not (source.size if isinstance(source, ObjectReader) else source.stat().st_size):
            raise InputError(f"{path} has 0 bytes: was it cut? Write it again, or leave it out of the input")
        yield source


def open_random(path: AnyPath) -> Path | pa.NativeFile:
    """Return what Arrow can read in any order: the path of a file, or an opened object.

    Raises the errors of `open_stream`.
    """
    with _not_empty(path) as source:
        if isinstance(source, ObjectReader):
            return pa.PythonFile(source, mode="r")
        return source if source == path else pa.OSFile(str(source))


def open_bytes(path: AnyPath) -> BinaryIO:
    """Open a file or an object for reading."""
    if isinstance(path, ObjectPath):
        return cast("BinaryIO", io.BufferedReader(ObjectReader(path), _BLOCK_BYTES))
    with admitted(path) as place:
        return place.open("rb")


def fingerprint(path: AnyPath) -> str:
    """Return a text that changes when a file or an object changes.

    For a file, it has the size, the time of the last change, and a digest of the first and last 64 KiB. For
    an object, it has the size, and the version or the time of the last change. Raises `InputError`,
    `StoreError` or `RunnerError` if the file or object cannot be read.
    """
    if isinstance(path, ObjectPath):
        info = path.about()
        version = next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), None)
        changed = next((f"of {info[name]}" for name in _TIMES if info.get(name)), "")
        return f"{info.get('size') or 0:,} bytes {version or changed}".strip().replace('"', "")
    try:
        with admitted(path) as place, place.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(file.read(_DIGESTED_BYTES))
            file.seek(max(status.st_size - _DIGESTED_BYTES, 0))
            digest.update(file.read(_DIGESTED_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    # in UTC, because a run may continue on a host with another time zone
    moment = dt.datetime.fromtimestamp(status.st_mtime_ns // 10**9, dt.UTC).replace(tzinfo=None)
    when = f"{moment}.{status.st_mtime_ns % 10**9:09} UTC"
    return f"{status.st_size:,} bytes of {when} (digest {digest.hexdigest()[:12]})"


@contextmanager
def admitted(path: Path) -> Iterator[Path]:
    """Check that a file of this host may be read, and yield a path at which to open it.

    Anything but a file is refused first, because opening it could block. If this process works for other
    users, the path is that of a descriptor: it leads to the file that was checked, even if `path` leads
    elsewhere later.

    Raises
    ------
    InputError
        The path is not a file.
    RunnerError
        This process may not read the file.
    OSError
        The file does not exist, or cannot be opened.
    """
    _check_kind(path, path.stat().st_mode)
    if not confined():
        yield path
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
        check_opened(descriptor, path, "read")
        yield Path(f"/dev/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise InputError(
            f"{path} is not a regular file; what can be read only once goes to standard input (-)"
        )


class ObjectReader(io.RawIOBase):
    """Reads an object in a store like a file, at any place.

    Parameters
    ----------
    path
        The object.

    Raises
    ------
    InputError, StoreError
        The object cannot be read, or cannot be read in parts, or the store did not answer for too long.
        `read` raises these errors, too.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._system, self._name = path.store
        size = path.about()["size"]
        if size is None:
            raise InputError(f"{path}: the server does not say how long it is; download it first")
        self.size = int(size)
        self._place = 0
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        self._place = max(base + offset, 0)
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, or fewer at the end of the object; by default, read to its end."""
        wanted = self.size - self._place
        wanted = max(wanted if size is None or size < 0 else min(size, wanted), 0)
        parts = []
        while wanted:
            block, start = divmod(self._place, _BLOCK_BYTES)
            data = self._block(block)[start : start + wanted]
            parts.append(data)
            self._place += len(data)
            wanted -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer until it is full or the object ends, and return the number of bytes.
        `io.BufferedReader` calls this.
        """
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _block(self, number: int) -> bytes:
        for wanted in range(number, number + 1 + _AHEAD):
            if wanted not in self._blocks and wanted * _BLOCK_BYTES < self.size:
                self._blocks[wanted] = _pool().submit(self._fetch, wanted)
        self._blocks.move_to_end(number)
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)
        future = self._blocks[number]
        if future.exception() is None:
            return future.result()
        data = patiently(self._path, lambda: self._fetch(number), WORK_SECONDS)
        self._blocks[number] = Future()
        self._blocks[number].set_result(data)
        return data

    def _fetch(self, number: int) -> bytes:
        start = number * _BLOCK_BYTES
        end = min(start + _BLOCK_BYTES, self.size)
        data: bytes = self._system.cat_file(self._name, start=start, end=end)
        if len(data) == self.size > end - start:
            raise InputError(f"{self._path}: the server sends files only as a whole; download it first")
        if len(data) != end - start:
            raise OSError(f"{len(data):,} bytes came instead of {end - start:,}")
        return data


@cache
def _pool() -> ThreadPoolExecutor:
    return system.Executor(4, "rankmill-read")
