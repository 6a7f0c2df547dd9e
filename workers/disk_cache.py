"""Files that are derived from models and cached on disk, under names that depend on all of their inputs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any


class Locked:
    """A lock on a file: it ends with `close`, with this object or with the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """End the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


@cache
def version(package: str) -> str:
    """Version of an installed package, on which what is made by it depends; read from its files once.

    Raises
    ------
    PackageNotFoundError
        It is not installed.
    """
    return metadata.version(package)


def cache_folder(setting: str) -> Path:
    """The cache folder; ``auto`` means ``rankmill`` in the user's cache folder."""
    if setting != "auto":
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rankmill"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`; if it does not exist, `build` fills it first.

    The folder appears with all of its files or not at all: several workers may build it at the same
    time, and any of them may die.

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    if folder.is_dir():
        used_now(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
        whole = Path(making) / "whole"
        whole.mkdir()
        build(whole)
        for file in whole.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        try:
            whole.rename(folder)
        except OSError:  # another process was faster; its files are equally good
            if not folder.is_dir():
                raise
    return folder


def used_now(folder: Path) -> None:
    """Note that `folder` is in use, so that others are removed before it where there is too much."""
    with suppress(OSError):
        os.utime(folder)


def lock(path: Path, *, shared: bool = False, wait: bool = True) -> Locked | None:
    """Lock a file, which is made; ``None`` if another process has it and this one does not `wait`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    locked = Locked(descriptor)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        locked.close()
        return None
    return locked


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically; raises `OSError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=".", delete=False, encoding="utf-8"
    ) as written:
        json.dump(values, written, indent=1)
    Path(written.name).replace(file)


def read_json(file: Path) -> dict[str, Any]:
    """Read a file of `write_json`; empty if the file does not exist or is not valid."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cache_name(source: str | Path, revision: str | None, *inputs: str, cache: Path | None = None) -> str:
    """A name for files that are derived from a model: a digest of its hub commit, or of its files' content.

    Parameters
    ----------
    source, revision
        As in `workers.backends.base.ModelFiles`.
    inputs
        Everything else that the files depend on.
    cache
        Cache folder, where digests of weights are remembered; ``None``: they are read.
    """
    parts = list(inputs)
    if isinstance(source, str):
        parts += [source, str(revision)]
    else:
        ours = source.glob("rankmill_*.json")  # as `rankmill quantize` adds
        for path in sorted([source / "config.json", *source.glob("*.safetensors"), *ours]):
            parts += [path.name, content_digest(path, cache)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


_SETTLED_SECONDS = 2.0
"""A file that changed more recently may change again at the same time: clocks of file systems are coarse."""


def content_digest(path: Path, cache: Path | None = None) -> str:
    """A digest of a file's content; of large weights, to read them takes seconds at each start.

    With `cache` it is remembered for as long as the file system says that the file is the same: its place,
    its size, and the times of its last change, of which a program can set only one.
    """
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        same = [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
        name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
        remembered = cache / "digests" / f"{name}.json" if cache else None
        found = read_json(remembered) if remembered else {}
        if found.get("same") == same and isinstance(known := found.get("digest"), str):
            return known
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
    if remembered and time.time() - max(about.st_mtime, about.st_ctime) > _SETTLED_SECONDS:
        with suppress(OSError):
            write_json(remembered, {"same": same, "digest": digest})
    return digest
