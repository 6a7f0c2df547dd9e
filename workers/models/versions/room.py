"""Room in the cache folder: what was not used for longest is removed first."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankmill.workers.host.disk_cache import Locked, lock

REGISTRY = "registry"
_LOCKS = ".locks"
_CONVERSIONS = ("openvino", "onnx")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A version or a conversion: its folder, its bytes, the time of its last use, and its lock, if any."""

    folder: Path
    bytes: int
    used: float
    lock: Path | None


def version_folder(cache: Path, name: str, version: str) -> Path:
    """The folder of a version in the cache."""
    return cache / REGISTRY / name / version


def version_lock(cache: Path, name: str, version: str) -> Path:
    """A file that is locked by all that use a version; it stays when the version is removed."""
    return cache / REGISTRY / _LOCKS / f"{name}@{version}"


def make_room(cache: Path, limit: int | None, *, needed: int = 0, keep: Path | None = None) -> int:
    """Remove what was not used for longest until `needed` more bytes fit; returns by how many they do not.

    Versions that a process uses stay, and so does the folder `keep`.
    """
    if limit is None:
        return 0
    entries = sorted(_entries(cache), key=lambda entry: entry.used)
    excess = sum(entry.bytes for entry in entries if entry.folder != keep) + needed - limit
    for entry in entries:
        if excess <= 0:
            break
        if entry.folder != keep and _remove(entry):
            excess -= entry.bytes
            logger.info("removed %s from the cache, which is full", entry.folder)
    return max(excess, 0)


def _entries(cache: Path) -> Iterator[_Entry]:
    for folder in (cache / REGISTRY).glob("*/*"):
        if folder.is_dir() and folder.parent.name != _LOCKS:
            held = version_lock(cache, folder.parent.name, folder.name)
            yield from _entry(folder, held)
    for kind in _CONVERSIONS:
        for folder in (cache / kind).glob("*"):
            yield from _entry(folder, None)


def _entry(folder: Path, held: Path | None) -> Iterator[_Entry]:
    with suppress(FileNotFoundError):  # another process may remove it
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        yield _Entry(folder, size, folder.stat().st_mtime, held)


def _remove(entry: _Entry) -> bool:
    """Remove an entry; whether it could be."""
    held: Locked | None = None
    try:
        if entry.lock is not None:
            held = lock(entry.lock, wait=False)
            if held is None:
                return False
        gone = entry.folder.with_name(f".removed-{uuid.uuid4().hex}")
        entry.folder.rename(gone)  # at once: nobody finds half of it
        shutil.rmtree(gone)
    except FileNotFoundError:
        return True
    except OSError as error:
        logger.warning("cannot remove %s from the cache: %s", entry.folder, error)
        return False
    finally:
        if held:
            held.close()
    return True
