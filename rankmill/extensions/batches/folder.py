"""Keeps the bytes of files and batches in a folder, or an object store, that gateways and runners share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rankmill.jobs.contract.errors import ConfigError, OutputError
from rankmill.jobs.system import system
from rankmill.producer.files.stores.output_record import record_of
from rankmill.producer.files.stores.paths import AnyPath, as_path
from rankmill.producer.files.stores.reading import open_bytes
from rankmill.producer.files.stores.writing import sync, whole_file

_BLOCK_BYTES = 1 << 20


class FilesFolder:
    """Keeps files in a folder that all gateways and runners see, or in an object store. An object store needs
    no folders and deletes old files by its own rules.

    Parameters
    ----------
    name
        The path or URL (the setting ``gateway_files``).

    Raises
    ------
    ConfigError
        The folder does not exist.
    """

    def __init__(self, name: str) -> None:
        path = as_path(name)
        self._local = path.resolve() if isinstance(path, Path) else None
        if self._local and not self._local.is_dir():
            raise ConfigError(f"gateway_files: {name} is not a folder; make it where runners see it")
        self.path: AnyPath = self._local or path

    def at(self, place: str) -> AnyPath:
        return self.path.joinpath(*place.split("/"))

    def make(self, name: str) -> None:
        """Make the folder `name` inside this folder, and sync the new entry to the disk. Raises `OutputError`
        if the folder cannot be made or synced.
        """
        if self._local is None:
            return
        try:
            (self._local / name).mkdir(exist_ok=True)
            sync(self._local)  # otherwise a power failure may lose the new folder
        except OSError as error:
            raise OutputError(f"the file cannot be kept: {error.strerror}") from None

    def save(self, source: BinaryIO, place: str) -> None:
        """Write the bytes of `source` to the file at `place`. The file appears only when it is complete and
        synced to the disk.

        Raises
        ------
        OutputError, StoreError
            The file cannot be written.
        """
        target = self.at(place)
        self.make(place.partition("/")[0])
        try:
            with whole_file(target) as partial, partial.open("wb") as file:
                shutil.copyfileobj(source, file, _BLOCK_BYTES)
        except OutputError as error:
            why = getattr(error.__context__, "strerror", None) or error
            raise OutputError(f"the file cannot be kept: {why}") from None

    def expire_early(self, name: str, seconds: float) -> None:
        """Let `sweep` delete the folder `name` as if the folder had been made `seconds` ago."""
        made = system.now() - seconds
        if self._local:
            os.utime(self._local / name, (made, made))

    def read(self, place: str) -> Iterator[bytes]:
        """Return the bytes of the file at `place`, in blocks. Raises `FileNotFoundError` if the file does not
        exist.
        """
        path = self.at(place)
        if not path.is_file():  # a store's own rules may have deleted it
            raise FileNotFoundError(path)
        return _blocks(open_bytes(path))

    def delete(self, place: str) -> None:
        target = self.at(place)
        target.unlink(missing_ok=True)
        record_of(target).unlink(missing_ok=True)
        if self._local:
            with suppress(OSError):  # raised if the folder has other files
                (self._local / place).parent.rmdir()

    def sweep(self, is_known: Callable[[str], bool], seconds: float) -> None:
        """Delete the folders of files and batches that are older than `seconds`. A folder is kept if
        `is_known` is true for the folder's name.
        """
        for folder in self._local.iterdir() if self._local else ():
            with suppress(OSError):
                ours = folder.name.startswith(("file-", "batch_"))
                if ours and folder.stat().st_mtime < system.now() - seconds and not is_known(folder.name):
                    shutil.rmtree(folder)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while block := file.read(_BLOCK_BYTES):
            yield block
