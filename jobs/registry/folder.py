"""The folder that holds a registry: on this host, or at any URL that fsspec can open."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import RankmillError, RegistryAway, RegistryError
from rankmill.jobs.runtime.passwords import mask_passwords

PIECE = 8 << 20
"""Bytes that are read or copied at a time."""

_S3 = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2}}}
"""botocore would wait for minutes for a server that is away."""

_UNFINISHED_SECONDS = 3600
"""Nobody writes to an unfinished file that has not changed for so long."""

_HIDDEN = "."
"""Files whose names begin so are not finished."""


class Folder:
    """Files by their paths, whose parts are given one by one. A file appears whole or not at all.

    Parameters
    ----------
    url
        A path, or a URL of fsspec: ``file://``, ``s3://``, ``gs://``, ``az://``, ``hf://``.

    Raises
    ------
    RegistryAway
        From all methods: the folder cannot be reached, is not there, or may not be read or written.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.url = mask_passwords(url)

    @cached_property
    def _opened(self) -> tuple[Any, str, bool]:
        """The file system, the path in it, and whether it is this host's."""
        from fsspec.core import split_protocol, url_to_fs  # slow to import

        options = _S3 if split_protocol(self._url)[0] in {"s3", "s3a"} else {}
        system, root = url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True, **options)
        return system, str(root).rstrip("/"), "file" in system.protocol

    def read(self, *path: str, most: int = 4 << 20) -> bytes | None:
        """A small file; ``None`` if it is not there."""
        with self._at_work() as (system, root, _):
            try:
                raw = bytes(system.cat_file("/".join((root, *path)), start=0, end=most + 1))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            if len(raw) > most:
                raise RegistryError(f"{'/'.join((self.url, *path))} is damaged: over {most:,} bytes")
            return raw

    def read_piece(self, start: int, end: int, *path: str) -> bytes:
        """Bytes `start` to `end` of a file; raises `RegistryError` if there is no such file."""
        with self._at_work() as (system, root, _):
            try:
                return bytes(system.cat_file("/".join((root, *path)), start=start, end=end))
            except FileNotFoundError:
                raise RegistryError(f"{'/'.join((self.url, *path))} is not there") from None

    def names(self, *path: str) -> list[str]:
        """Names of what is in a folder; none if there is no such folder."""
        with self._at_work() as (system, root, _):
            try:
                found = system.ls("/".join((root, *path)), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {str(each).rstrip("/").rpartition("/")[2] for each in found}
            return sorted(name for name in names if name and not name.startswith(_HIDDEN))

    def sizes(self, *path: str) -> dict[str, int]:
        """Sizes of all files below a folder, by their paths in it."""
        with self._at_work() as (system, root, _):
            folder = "/".join((root, *path))
            try:
                found = system.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            inside = {
                str(name).removeprefix(folder).lstrip("/"): int(each["size"]) for name, each in found.items()
            }
            return {name: size for name, size in inside.items() if not Path(name).name.startswith(_HIDDEN)}

    def create(self, value: bytes, *path: str) -> bool:
        """Write a small file unless it is there; whether it was written."""
        with self._at_work() as (system, root, is_local):
            target = "/".join((root, *path))
            try:
                if is_local:
                    with _beside(target) as new:
                        _write(new, value)
                        os.link(new, target)
                else:
                    system.pipe_file(target, value, mode="create")
            except FileExistsError:
                return False
            return True

    def replace(self, value: bytes, *path: str) -> None:
        """Write a small file, also in the place of one."""
        with self._at_work() as (system, root, is_local):
            target = "/".join((root, *path))
            if not is_local:
                system.pipe_file(target, value)
                return
            with _beside(target) as new:
                _write(new, value)
                new.replace(target)

    def upload(self, source: Path, on_bytes: Callable[[int], None], *path: str) -> None:
        """Copy a file of this host; `on_bytes` is told the size of each piece."""
        with self._at_work() as (system, root, is_local):
            target = "/".join((root, *path))
            if not is_local:
                system.put_file(str(source), target, callback=_callback(on_bytes))
                return
            with _beside(target) as new:
                with source.open("rb") as old, new.open("wb") as copy:
                    while piece := old.read(PIECE):
                        copy.write(piece)
                        on_bytes(len(piece))
                    copy.flush()
                    os.fsync(copy.fileno())
                new.replace(target)

    def tidy(self, *path: str) -> None:
        """Remove unfinished files that killed processes have left in a folder of this host."""
        with self._at_work() as (_, root, is_local):
            for file in Path(root, *path).glob(f"{_HIDDEN}*") if is_local else ():
                with suppress(FileNotFoundError):
                    if file.stat().st_mtime < time.time() - _UNFINISHED_SECONDS:
                        file.unlink()

    def remove(self, *path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing if it is not there."""
        with self._at_work() as (system, root, _), suppress(FileNotFoundError):
            system.rm("/".join((root, *path)), recursive=True)

    @contextmanager
    def _at_work(self) -> Iterator[tuple[Any, str, bool]]:
        try:
            system, root, is_local = self._opened
            if is_local and not Path(root).is_dir():
                raise RegistryAway(
                    f"the registry {self.url} is not there: make the folder, or correct RANKMILL_REGISTRY"
                )
            yield system, root, is_local
        except RankmillError:
            raise
        except ImportError as error:
            raise RegistryAway(
                f"the registry {self.url} needs a package that is not installed ({error}); "
                "pip install 'rankmill[s3]' has that of s3://"
            ) from None
        except Exception as error:  # each file system has errors of its own
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise RegistryAway(f"the registry {self.url} cannot be used: {mask_passwords(reason)}") from error


@contextmanager
def _beside(target: str) -> Iterator[Path]:
    """A new name in the folder of `target`, which is made; what is left under the new name is removed."""
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{_HIDDEN}{uuid.uuid4().hex}")
    try:
        yield new
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        new.unlink(missing_ok=True)


def _write(path: Path, value: bytes) -> None:
    with path.open("wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())


def _callback(on_bytes: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    class Bytes(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            on_bytes(inc)

    return Bytes()
