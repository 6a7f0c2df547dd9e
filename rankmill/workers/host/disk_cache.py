"""Caches on disk what is derived from models. A cached folder's name depends on all inputs of its files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rankmill.jobs.cache import (
    KeptFolder,
    Locked,
    file_digest,
    lock,
    make_folder,
    read_json,
    strangers,
    temporary_folder,
    write_json,
)
from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.model_files import model_content
from rankmill.jobs.system import system

_DIGESTS = "digests.json"
"""Name of a file in each cached folder, which has the folder's name and the SHA-256 of every other file."""

logger = logging.getLogger(__name__)


@cache
def version(package: str) -> str:
    """Version of an installed package, read from its files only once.

    `package` is the name in imports; the package may be installed under another name, such as
    ``onnxruntime-gpu``.

    Raises
    ------
    PackageNotFoundError
        The package is not installed.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package)
        if not names:
            raise
        return metadata.version(names[0])


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Make `folder` unless it exists: `build` fills it, and a file with the files' digests is added.

    The digests let `is_kept` find changed files later.

    The folder appears with all of its files or not at all: several workers may build it at the same
    time, and any of them may die.

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with temporary_folder(".making-", folder.parent) as making:
        whole = making / "whole"
        make_folder(whole)
        build(whole)
        write_json(whole / _DIGESTS, {"of": folder.name, "files": _digests(whole, None)})
        for file in whole.iterdir():
            with file.open("rb") as written:
                system.fsync(written.fileno())
        try:
            whole.rename(folder)
        except OSError:  # another process may have been faster, and its files are as good
            if not folder.is_dir():
                raise
    return folder


def is_kept(folder: Path, cache: Path) -> bool:
    """Return whether a cached folder exists and is unchanged since `build_once` made it.

    An unchanged folder is marked as in use; a changed folder is removed. The first call for a folder reads
    all of its files, which may take a while. Several threads may call this.

    Raises
    ------
    WorkerError
        Other users can write to the folder.
    """
    if not folder.is_dir():
        return False
    if why := strangers(folder, cache):
        raise WorkerError(why)
    made = read_json(folder / _DIGESTS)
    with suppress(OSError):
        if made == {"of": folder.name, "files": _digests(folder, cache)}:
            used_now(folder)
            return True
    logger.warning("%s is damaged and will be made again: its files are not those that were kept", folder)
    shutil.rmtree(folder, ignore_errors=True)
    return False


def try_to_keep(file: Path, values: dict[str, Any], name: str) -> None:
    """Write a JSON file into the cache folder, or log why it cannot be written.

    `name` says in the log what the file contains.
    """
    try:
        write_json(file, values)
    except OSError as error:
        logger.warning("%s cannot be kept: %s", name, error)


def digest(value: object) -> str:
    """Return a short digest of a value's `repr`, for the name of a file that depends on the value."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def kept_as(folder: Path) -> str:
    """A digest of a cached folder's content."""
    return hashlib.sha256(json.dumps(read_json(folder / _DIGESTS), sort_keys=True).encode()).hexdigest()


def _digests(folder: Path, cache: Path | None) -> dict[str, str]:
    return {file.name: file_digest(file, cache) for file in folder.iterdir() if file.name != _DIGESTS}


def used_now(folder: Path) -> None:
    """Mark `folder` as in use, so that other folders are removed before this one if the cache is full."""
    with suppress(OSError):
        os.utime(folder)


def make_room(kept: Iterable[KeptFolder], limit: int, *, needed: int = 0, keep: Path | None = None) -> int:
    """Remove cached folders, the longest unused first, until at most `limit` bytes are used.

    A folder that a process has locked is not removed.

    Parameters
    ----------
    kept
        The cached folders.
    limit
        The limit in bytes.
    needed
        Bytes that count as used too. If they exceed the limit by themselves, nothing is removed.
    keep
        A folder that is not removed, and does not count.

    Returns
    -------
    int
        The number of bytes that are still over the limit.
    """
    if needed > limit:
        return needed - limit
    uses = {entry: use for entry in kept if entry.folder != keep and (use := _use(entry.folder))}
    excess = sum(size for _, size in uses.values()) + needed - limit
    for entry in sorted(uses, key=lambda entry: uses[entry]):
        if excess > 0 and _remove(entry):
            excess -= uses[entry][1]
            logger.info("removed %s from the cache, which is full", entry.folder)
    return max(excess, 0)


def _use(folder: Path) -> tuple[float, int] | None:
    """Return the time of a cached folder's last use and its bytes, or ``None`` if it is gone."""
    try:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return folder.stat().st_mtime, size
    except FileNotFoundError:  # another process has removed the folder
        return None


def _remove(entry: KeptFolder) -> bool:
    """Remove a cached folder; returns false if a process has locked it, or it cannot be removed."""
    held: Locked | None = None
    try:
        if entry.lock is not None:
            held = lock(entry.lock, wait=False)
            if held is None:
                return False
        gone = entry.folder.with_name(f".removed-{system.unique_id()}")
        entry.folder.rename(gone)  # in one step, so that no reader finds half of the folder
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


def cache_name(source: str | Path, revision: str | None, *inputs: str) -> str:
    """A name for files that are derived from a model. It changes with the model's content and with `inputs`.

    Parameters
    ----------
    source, revision
        As in `rankmill.workers.backends.base.ModelFiles`.
    inputs
        Everything else that the files depend on.
    """
    model = [source, str(revision)] if isinstance(source, str) else [revision or model_content(source)]
    return hashlib.sha256("\n".join([*inputs, *model]).encode()).hexdigest()[:32]
