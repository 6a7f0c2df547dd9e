"""Digests of files' contents: of all bytes, and remembered for as long as the file is the same."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from rankmill.jobs.cache.folder import read_json, strangers, write_json
from rankmill.jobs.system import system

Facts = tuple[int, int, int, int, int]
"""A file's device, inode, size and the times of its last change, of which a program can set only one."""

_SETTLED_SECONDS = 2.0
"""A file that changed more recently may change again at the same time: clocks of file systems are coarse."""

_SMALL = 1 << 20
"""Smaller files (bytes) are read each time: to remember them would take as long."""


def facts_of(about: os.stat_result) -> Facts:
    """What changes when the file or its content does."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def file_digest(path: Path, cache: Path | None = None) -> str:
    """The SHA-256 of a file; of large weights, to read them takes seconds to minutes. Threads may call it.

    With `cache`, the cache folder, it is remembered there for as long as the file's facts are the same.
    A folder that strangers can write is not believed.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        same = list(facts_of(about))
        remembered = _place(path, cache) if about.st_size >= _SMALL else None
        found = read_json(remembered) if remembered else {}
        if found.get("same") == same and isinstance(known := found.get("sha256"), str):
            return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        settled = system.now() - max(about.st_mtime, about.st_ctime) > _SETTLED_SECONDS
        if remembered and settled and list(facts_of(os.fstat(file.fileno()))) == same:
            with suppress(OSError):
                write_json(remembered, {"same": same, "sha256": digest})
    return digest


def _place(path: Path, cache: Path | None) -> Path | None:
    """Where the digest of a file is remembered; ``None``: nowhere."""
    if cache is None or strangers(cache / "digests", cache):
        return None
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache / "digests" / f"{name}.json"
