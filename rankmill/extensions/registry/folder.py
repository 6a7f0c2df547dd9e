"""Reads and writes the files of a registry, in a folder of this host or at a URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from rankmill.jobs.contract.errors import RankmillError, RegistryAway, RegistryError
from rankmill.jobs.runtime.installation import install_line
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.system import system
from rankmill.producer.files.stores.writing import sync

PIECE = 8 << 20

_S3 = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2}}}
"""Options for S3. Without them, botocore waits for minutes for a server that does not answer."""

_HIDDEN = "."
"""Unfinished files in a registry have names that begin with this character."""


class RegistryFolder:
    """Reads and writes files in a registry's folder; a written file appears when it is complete. Methods take
    the parts of a path as separate arguments.

    All methods raise `RegistryAway` if the folder cannot be reached, does not exist, or may not be used.

    Parameters
    ----------
    url
        As for `rankmill.extensions.registry.registry.Registry`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.url = mask_passwords(url)

    @cached_property
    def _system(self) -> tuple[Any, str, bool]:
        from fsspec.core import split_protocol, url_to_fs  # slow to import

        options = _S3 if split_protocol(self._url)[0] in {"s3", "s3a"} else {}
        system, root = url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True, **options)
        return system, str(root).rstrip("/"), "file" in system.protocol

    def read(self, *path: str, most: int = 4 << 20) -> bytes | None:
        """The content of a file; ``None`` if the file does not exist. Raises `RegistryError` if the file has
        more than `most` bytes.
        """
        with self.opened(*path) as (system, place, _):
            try:
                raw = bytes(system.cat_file(place, start=0, end=most + 1))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            if len(raw) > most:
                raise RegistryError(f"{'/'.join((self.url, *path))} is damaged: over {most:,} bytes")
            return raw

    def read_piece(self, start: int, end: int, *path: str) -> bytes:
        """Bytes `start` to `end` of a file; raises `RegistryError` if the file does not exist."""
        with self.opened(*path) as (system, place, _):
            try:
                return bytes(system.cat_file(place, start=start, end=end))
            except FileNotFoundError:
                raise RegistryError(f"{'/'.join((self.url, *path))} is not there") from None

    def names(self, *path: str) -> list[str]:
        """Return the names of the files and folders in a folder, without unfinished files; empty if the
        folder does not exist.
        """
        with self.opened(*path) as (system, place, _):
            try:
                paths = system.ls(place, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {str(path).rstrip("/").rpartition("/")[2] for path in paths}
            return sorted(name for name in names if name and not name.startswith(_HIDDEN))

    def sizes(self, *path: str) -> dict[str, int]:
        with self.opened(*path) as (system, place, _):
            try:
                entries = system.find(place, detail=True)
            except FileNotFoundError:
                return {}
            inside = {
                str(name).removeprefix(place).lstrip("/"): int(entry["size"])
                for name, entry in entries.items()
            }
            return {name: size for name, size in inside.items() if not Path(name).name.startswith(_HIDDEN)}

    def create(self, value: bytes, *path: str) -> bool:
        """Write a small file unless it exists; returns whether it was written."""
        with self.opened(*path) as (system, place, is_local):
            try:
                if is_local:
                    with _new_file(place, os.link) as file:
                        file.write(value)
                else:
                    system.pipe_file(place, value, mode="create")
            except FileExistsError:
                return False
            return True

    def replace(self, value: bytes, *path: str) -> None:
        with self.opened(*path) as (system, place, is_local):
            if not is_local:
                system.pipe_file(place, value)
                return
            with _new_file(place, os.replace) as file:
                file.write(value)

    def upload(self, source: Path, on_bytes: Callable[[int], None], *path: str) -> None:
        with self.opened(*path) as (system, place, is_local):
            if not is_local:
                system.put_file(str(source), place, callback=_callback(on_bytes))
                return
            with source.open("rb") as old, _new_file(place, os.replace) as file:
                while piece := old.read(PIECE):
                    file.write(piece)
                    on_bytes(len(piece))

    def remove(self, *path: str) -> None:
        with self.opened(*path) as (system, place, _), suppress(FileNotFoundError):
            system.rm(place, recursive=True)

    @contextmanager
    def opened(self, *path: str) -> Iterator[tuple[Any, str, bool]]:
        """Yield fsspec's file system, the whole path, and whether the file system is this host's own. An
        error in the ``with`` block becomes a `RegistryAway`, unless it is a `RankmillError`.
        """
        try:
            system, root, is_local = self._system
            if is_local and not Path(root).is_dir():
                raise RegistryAway(
                    f"the registry {self.url} is not there: make the folder, or correct RANKMILL_REGISTRY"
                )
            yield system, "/".join((root, *path)), is_local
        except RankmillError:
            raise
        except ImportError as error:
            raise RegistryAway(
                f"the registry {self.url} needs a package that is not installed ({error}); "
                f"{install_line('s3')} brings that of s3://"
            ) from None
        except Exception as error:  # each file system raises its own errors
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise RegistryAway(f"the registry {self.url} cannot be used: {mask_passwords(reason)}") from error


@contextmanager
def _new_file(target: str, put: Callable[[Path, Path], None]) -> Iterator[BinaryIO]:
    """Yield a new file with a temporary name. At the end of the ``with`` block, the file is synced to the
    disk, and `put` gives the file the name `target`.
    """
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{_HIDDEN}{system.unique_id()}")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            system.fsync(file.fileno())
        put(new, path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _callback(on_bytes: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Bytes(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            on_bytes(inc)

    return Bytes()
