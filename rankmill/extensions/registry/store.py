"""Writes to a registry. Each change becomes visible as a whole, or not at all."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rankmill.extensions.registry.documents import ALIASES, Alias, Manifest, Reference, parse_reference
from rankmill.extensions.registry.registry import HIDDEN, MANIFEST, PIECE, REMOVED, Registry, RegistryFolder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.model_names import has_tag
from rankmill.jobs.system import system
from rankmill.producer.files.stores.writing import sync

_UNFINISHED_SECONDS = 3600
"""An unfinished file that has not changed for this number of seconds counts as abandoned."""


class WritableFolder(RegistryFolder):
    """Writes files in a registry's folder; each file appears when it is complete."""

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
            return {name: size for name, size in inside.items() if not Path(name).name.startswith(HIDDEN)}

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

    def tidy(self, *path: str) -> None:
        """Remove unfinished files that killed processes have left, if the folder is on this host's own file
        system.
        """
        with self.opened(*path) as (_, place, is_local):
            for file in Path(place).glob(f"{HIDDEN}*") if is_local else ():
                with suppress(FileNotFoundError):
                    if file.stat().st_mtime < system.now() - _UNFINISHED_SECONDS:
                        file.unlink()

    def remove(self, *path: str) -> None:
        with self.opened(*path) as (system, place, _), suppress(FileNotFoundError):
            system.rm(place, recursive=True)


class RegistryStore(Registry):
    """Reads and writes the models of a registry."""

    folder: WritableFolder

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.folder = WritableFolder(url)

    def publish(self, manifest: Manifest) -> bool:
        """Make a version of a model visible, after all its files are complete. Returns ``False`` if another
        push has made the version visible before.
        """
        return self.folder.create(manifest.written(), manifest.name, manifest.version, MANIFEST)

    def write_alias(self, reference: Reference, alias: Alias) -> None:
        self.folder.replace(alias.written(), reference.name, ALIASES, f"{reference.tag}.json")

    def remove_alias(self, reference: Reference) -> None:
        self.folder.remove(reference.name, ALIASES, f"{reference.tag}.json")

    def remove(self, reference: Reference, note: bytes) -> None:
        """Remove a version of a model. First `note` is written, which makes the version invisible, then the
        files are deleted.
        """
        self.folder.replace(note, *reference, REMOVED)
        for name in self.folder.names(*reference):
            if name != REMOVED:
                self.folder.remove(*reference, name)


def next_version(taken: Iterable[str]) -> str:
    """Return the name of a new version: ``v4`` if `taken` has ``v1`` and ``v3``."""
    numbers = [int(version[1:]) for version in taken if re.fullmatch(r"v[0-9]{1,9}", version)]
    return f"v{max(numbers, default=0) + 1}"


@contextmanager
def _new_file(target: str, put: Callable[[Path, Path], None]) -> Iterator[BinaryIO]:
    """Yield a new file with a temporary name. At the end of the ``with`` block, the file is synced to the
    disk, and `put` gives the file the name `target`.
    """
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{HIDDEN}{system.unique_id()}")
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


def reference(text: str, noun: str = "VERSION") -> Reference:
    """Read the name of a version or alias from a command; raises `InputError` if `text` is not NAME@TAG."""
    if not has_tag(text):
        raise InputError(f"{text} is not of the form NAME@{noun}")
    return parse_reference(text)


def who() -> str:
    """Return the name under which this process changes a registry: the user and the host, ``USER@HOST``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user of a container may lack a name
        user = "?"
    return f"{user}@{socket.gethostname()}"
