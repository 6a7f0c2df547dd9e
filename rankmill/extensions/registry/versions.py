"""Keeps versions of a registry's models in this host's cache.

A version is fetched and verified once for all workers of the host. It is removed when its disk space is
needed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from rankmill.extensions.registry.documents import Manifest, Reference
from rankmill.extensions.registry.registry import Registry, fetch_files
from rankmill.jobs.cache import KeptFolder, file_digest, lock, make_folder, strangers
from rankmill.jobs.contract.errors import InputError, RegistryAway, RegistryError, WorkerError
from rankmill.jobs.model_files import model_files
from rankmill.jobs.model_names import CacheRoom, ModelCopy
from rankmill.jobs.system import system
from rankmill.producer.files.stores.writing import sync

REGISTRY = "registry"
_LOCKS = ".locks"
_MANIFEST = "manifest.json"
_MODEL = "model"
_FETCHING = ".fetching"

_FULL = {errno.ENOSPC, errno.EDQUOT}

logger = logging.getLogger(__name__)


def version_lock(cache: Path, name: str, version: str) -> Path:
    """The file that a process locks while it uses a version. The file stays when the version is removed."""
    return cache / REGISTRY / _LOCKS / f"{name}@{version}"


def kept_versions(cache: Path) -> Iterator[KeptFolder]:
    """The folders of the versions in the cache, with their locks."""
    for folder in (cache / REGISTRY).glob("*/*"):
        if folder.is_dir() and folder.parent.name != _LOCKS:
            yield KeptFolder(folder, version_lock(cache, folder.parent.name, folder.name))


class VersionStore:
    """Fetches versions of models from a registry, and keeps them in this host's cache folder.

    Parameters
    ----------
    cache
        This host's cache folder, from which old models can be removed to make room.
    registry
        The registry. With ``None``, only versions that are in the cache can be used.
    """

    def __init__(self, cache: CacheRoom, registry: Registry | None) -> None:
        self._room, self._cache = cache, cache.folder
        self._registry = registry

    def get(self, reference: Reference, content: str | None) -> ModelCopy:
        """Return this host's copy of a version, locked so that no other process removes it.

        The version is fetched if this host lacks it, or if the registry now has other content under its name.

        Parameters
        ----------
        reference
            The names of the model and of the version.
        content
            The digest that the copy must have; ``None`` if the caller does not know it.

        Raises
        ------
        WorkerError
            In five cases:

            - This host lacks the version and cannot fetch it.
            - The cache folder is full or cannot be used.
            - The version does not have the required digest.
            - The registry has other content under the version's name, and a process of this host still uses
              the old content.
            - Other users can write to the copy.
        """
        name, version = reference
        folder, file = self._cache / REGISTRY / name / version, version_lock(self._cache, name, version)
        with ExitStack() as stack:
            try:
                wanted = self._wanted(reference, folder, file, content)
                held = lock(file, shared=True)
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
            if wanted not in {None, manifest.content}:
                raise WorkerError(
                    f"{reference} on worker host {socket.gethostname()} has content {manifest.content:.12}, "
                    f"and the run wants {wanted:.12}: is RANKMILL_REGISTRY the same everywhere?"
                )
            stack.pop_all()
        return ModelCopy(folder / _MODEL, manifest.content, held)

    def _wanted(self, reference: Reference, folder: Path, file: Path, content: str | None) -> str | None:
        """Return the digest that a version must have: `content` or, if that is ``None``, the digest in the
        registry. Returns ``None`` if neither is known.

        Also deletes an outdated cached copy of the version. A copy is outdated if the registry has the
        version, and the copy's digest is neither `content` nor the registry's: for example, it came from
        another registry.
        """
        kept = now = None
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                kept = Manifest.read((folder / _MANIFEST).read_bytes(), "a manifest").content
            if self._registry is not None and (kept is None or kept != content):
                now = self._registry.manifest(reference).content
        except (InputError, RegistryAway, RegistryError):  # `_fetch` raises the error, if it is called
            return content
        if kept is not None and now not in {None, kept}:
            self._remove(reference, folder, file, f"{kept:.12}")
        return content or now

    def _remove(self, reference: Reference, folder: Path, file: Path, kept: str) -> None:
        held = lock(file, wait=False)
        if held is None:
            raise WorkerError(
                f"{reference} has other content in the registry, and worker host {socket.gethostname()} uses "
                f"content {kept} of this name: wait until it is unloaded, or set another cache_dir"
            )
        with closing(held):
            logger.warning("%s is fetched again: the registry has other content under this name", folder)
            shutil.rmtree(folder)

    def _whole(self, folder: Path) -> Manifest | None:
        """Verify the files of a cached version. Returns ``None`` if a file is missing, changed, or not in the
        manifest.
        """
        try:
            manifest = Manifest.read((folder / _MANIFEST).read_bytes(), "a manifest")
            digests = [file_digest(folder / _MODEL / file.path, self._cache) for file in manifest.files]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except RegistryError as error:
            logger.warning("%s is fetched again: %s", folder, error)
            return None
        pairs = zip(manifest.files, digests, strict=True)
        changed = [file.path for file, digest in pairs if digest != file.sha256]
        changed += _foreign(manifest, folder)
        if changed:
            logger.warning("%s is fetched again: %s is not what was kept there", folder, changed[0])
            return None
        return manifest

    def _fetch(self, reference: Reference, folder: Path) -> Manifest:
        """Fetch and verify a version. The manifest is written last: a folder with a manifest is complete."""
        if self._registry is None:
            raise WorkerError(
                f"model {reference} is a version in a registry, and worker host {socket.gethostname()} "
                "has no RANKMILL_REGISTRY"
            )
        started = system.monotonic()
        try:
            manifest = self._registry.manifest(reference)
            if lacking := self._room.make_room(manifest.bytes, keep=folder):
                raise WorkerError(
                    f"{manifest} has {_gib(manifest.bytes)} and cache_gib leaves "
                    f"{_gib(manifest.bytes - lacking)} for it on host {socket.gethostname()}; raise cache_gib"
                )
            make_folder(folder / _MODEL)
            for path in _foreign(manifest, folder):
                (folder / _MODEL / path).unlink()
            fetch_files(self._registry, manifest, folder / _MODEL, folder / _FETCHING)
        except RegistryAway as error:
            raise WorkerError(f"{reference} is not in this host's cache, and {error}") from error
        except (InputError, RegistryError) as error:
            raise WorkerError(str(error)) from error
        written = folder / _FETCHING / _MANIFEST
        written.write_bytes(manifest.written())
        sync(written)
        written.replace(folder / _MANIFEST)
        shutil.rmtree(folder / _FETCHING, ignore_errors=True)
        logger.info("fetched %s in %.1f s", reference, system.monotonic() - started)
        return manifest

    def _cannot_keep(self, reference: Reference, error: OSError) -> str:
        why = "is full" if error.errno in _FULL else f"cannot be used ({error.strerror or error})"
        return (
            f"{reference} cannot be kept on worker host {socket.gethostname()}: {self._cache} {why}; free "
            "some space, lower cache_gib, or set another cache_dir"
        )


@contextmanager
def _removed_if_full(folder: Path) -> Iterator[None]:
    """If the disk gets full in the ``with`` block, remove the version's folder `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _foreign(manifest: Manifest, folder: Path) -> list[str]:
    """Return the files that a worker would load as part of the model, though the manifest does not list
    them.
    """
    return sorted(model_files(folder / _MODEL).keys() - {file.path for file in manifest.files})


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
