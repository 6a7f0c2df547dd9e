"""Keeps versions of a registry's models in this host's cache.

A version is fetched once for all workers, verified, and removed when its room is needed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rankmill.extensions.registry.documents import Manifest, Reference
from rankmill.extensions.registry.registry import Registry, fetch_files
from rankmill.extensions.registry.resolver import Resolver
from rankmill.jobs.cache import file_digest, make_folder, strangers
from rankmill.jobs.contract.errors import InputError, RankmillError, RegistryAway, RegistryError, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.model_files import model_files
from rankmill.jobs.system import system
from rankmill.workers.backends.registry import backends
from rankmill.workers.host.disk_cache import Locked, lock

REGISTRY = "registry"
_LOCKS = ".locks"

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"

_MODEL = "model"

_FETCHING = ".fetching"

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class _Entry:
    """A version or a conversion in the cache, with its folder, bytes, time of last use, and lock if any."""

    folder: Path
    bytes: int
    used: float
    lock: Path | None


def version_folder(cache: Path, name: str, version: str) -> Path:
    """The folder of a version in the cache."""
    return cache / REGISTRY / name / version


def version_lock(cache: Path, name: str, version: str) -> Path:
    """A file that every user of a version locks; it stays when the version is removed."""
    return cache / REGISTRY / _LOCKS / f"{name}@{version}"


def make_room(cache: Path, limit: int | None, *, needed: int = 0, keep: Path | None = None) -> int:
    """Remove the entries unused for longest until `needed` more bytes fit; returns how many bytes do not fit.

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
    for backend in backends():  # each backend keeps its conversions in a folder of its name
        for folder in (cache / backend).glob("*"):
            yield from _entry(folder, None)


def _entry(folder: Path, held: Path | None) -> Iterator[_Entry]:
    with suppress(FileNotFoundError):  # another process may remove it
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        yield _Entry(folder, size, folder.stat().st_mtime, held)


def _remove(entry: _Entry) -> bool:
    """Remove an entry; returns whether it was removed."""
    held: Locked | None = None
    try:
        if entry.lock is not None:
            held = lock(entry.lock, wait=False)
            if held is None:
                return False
        gone = entry.folder.with_name(f".removed-{system.unique_id()}")
        entry.folder.rename(gone)  # at once, so that no reader finds a part of it
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


@dataclass(frozen=True)
class Version:
    """A version on this host: its folder and the digest of its content; it stays while ``held`` is open."""

    folder: Path
    content: str
    held: Locked


class VersionStore:
    """Fetches and keeps versions in a cache folder.

    Parameters
    ----------
    cache
        The folder.
    registry
        URL of the registry that has the versions; ``None`` if there is none.
    limit
        Most bytes in the folder; with ``None`` there is no limit.
    """

    def __init__(self, cache: Path, registry: str | None, limit: int | None) -> None:
        self._cache = cache
        self._registry = registry
        self._limit = limit

    def get(self, reference: Reference, content: str | None) -> Version:
        """A version, fetched now if this host lacks it; `content` is the digest that it must have, if known.

        Raises
        ------
        WorkerError
            This host lacks the version and cannot fetch it, or it has other content. Another worker may have
            it.
        """
        name, version = reference
        folder, file = version_folder(self._cache, name, version), version_lock(self._cache, name, version)
        with ExitStack() as stack:
            try:
                held = lock(file, shared=True)  # no other process removes it from now on
                assert held
                stack.callback(held.close)
                if why := strangers(folder / _MODEL, self._cache):
                    raise WorkerError(why)
                manifest = self._whole(folder)
                if manifest is None:
                    fetching = lock(file.with_name(f"{file.name}.fetching"))
                    assert fetching
                    with closing(fetching), _removed_if_full(folder):
                        manifest = self._whole(folder) or self._fetch(reference, folder)
                os.utime(folder)
            except OSError as error:
                raise WorkerError(self._cannot_keep(reference, error)) from error
            if content not in {None, manifest.content}:
                raise WorkerError(
                    f"{reference} on worker host {socket.gethostname()} has content {manifest.content:.12}, "
                    f"and the run wants {content:.12}: is RANKMILL_REGISTRY the same everywhere?"
                )
            stack.pop_all()
        return Version(folder / _MODEL, manifest.content, held)

    def _whole(self, folder: Path) -> Manifest | None:
        """The manifest of a version whose files are all here and match the manifest; otherwise ``None``."""
        try:
            manifest = Manifest.read((folder / _MANIFEST).read_bytes(), "a manifest")
            found = [file_digest(folder / _MODEL / file.path, self._cache) for file in manifest.files]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except RegistryError as error:
            logger.warning("%s is fetched again: %s", folder, error)
            return None
        pairs = zip(manifest.files, found, strict=True)
        changed = [file.path for file, digest in pairs if digest != file.sha256]
        changed += _foreign(manifest, folder)
        if changed:
            logger.warning("%s is fetched again: %s is not what was kept there", folder, changed[0])
            return None
        return manifest

    def trim(self) -> None:
        """Remove entries until the folder is within the limit."""
        make_room(self._cache, self._limit)

    def _fetch(self, reference: Reference, folder: Path) -> Manifest:
        """Fetch and verify a version; the manifest is written last, so that a folder with one is complete."""
        if self._registry is None:
            raise WorkerError(
                f"model {reference} is a version in a registry, and worker host {socket.gethostname()} "
                "has no RANKMILL_REGISTRY"
            )
        registry = Registry(self._registry)
        started = system.monotonic()
        try:
            manifest = registry.manifest(reference)
            self._reserve(manifest, folder)
            make_folder(folder / _MODEL)
            for path in _foreign(manifest, folder):
                (folder / _MODEL / path).unlink()
            fetch_files(registry, manifest, folder / _MODEL, folder / _FETCHING)
        except RegistryAway as error:
            raise WorkerError(f"{reference} is not in this host's cache, and {error}") from error
        except (InputError, RegistryError) as error:
            raise WorkerError(str(error)) from error
        _write(folder / _FETCHING / _MANIFEST, manifest.written())
        (folder / _FETCHING / _MANIFEST).replace(folder / _MANIFEST)
        shutil.rmtree(folder / _FETCHING, ignore_errors=True)
        logger.info("fetched %s in %.1f s", reference, system.monotonic() - started)
        return manifest

    def _reserve(self, manifest: Manifest, folder: Path) -> None:
        if self._limit is not None and manifest.bytes > self._limit:
            lacking = manifest.bytes - self._limit
        else:
            lacking = make_room(self._cache, self._limit, needed=manifest.bytes, keep=folder)
        if lacking:
            raise WorkerError(
                f"{manifest} has {_gib(manifest.bytes)} and cache_gib leaves "
                f"{_gib(manifest.bytes - lacking)} for it on host {socket.gethostname()}; raise cache_gib"
            )

    def _cannot_keep(self, reference: Reference, error: OSError) -> str:
        why = "is full" if error.errno in _FULL else f"cannot be used ({error.strerror or error})"
        return (
            f"{reference} cannot be kept on worker host {socket.gethostname()}: {self._cache} {why}; free "
            "some space, lower cache_gib, or set another cache_dir"
        )


@contextmanager
def _removed_if_full(folder: Path) -> Iterator[None]:
    """If the disk is full, remove the parts of a version that are here, as they take room from others."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _foreign(manifest: Manifest, folder: Path) -> list[str]:
    """Model files that lie in a version's folder but do not belong to it."""
    return sorted(model_files(folder / _MODEL).keys() - {file.path for file in manifest.files})


def _write(path: Path, value: bytes) -> None:
    with path.open("wb") as file:
        file.write(value)
        file.flush()
        system.fsync(file.fileno())


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


class Aliases:
    """Finds the versions that aliases of a registry stand for; the registry is a URL or ``None``."""

    def __init__(self, registry: str | None) -> None:
        self._resolver = Resolver(registry)

    def pinned(self, spec: ScoreSpec) -> ScoreSpec:
        """`spec` with the version that its model stands for now.

        Raises
        ------
        WorkerError
            This worker cannot find the version, because its registry is away, or does not have the alias.
        """
        try:
            return self._resolver.pinned(spec)
        except RankmillError as error:
            raise WorkerError(str(error)) from error
