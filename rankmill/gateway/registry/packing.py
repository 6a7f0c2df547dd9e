"""Packing the files of a version into the tar archive that a client pulls."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rankmill.jobs.registry.documents import Manifest, ModelFile
from rankmill.jobs.registry.registry import PIECE


class Packed:
    """A tar archive of a version's files, made while it is read.

    Parameters
    ----------
    manifest
        The version.
    folder
        Has its files.
    held
        What the folder needs. It is closed with the last piece, or when nobody reads on.
    """

    def __init__(self, manifest: Manifest, folder: Path, held: ExitStack) -> None:
        self._folder = folder
        self._held = held
        self._entries = [(file, _head(file, int(manifest.at))) for file in manifest.files]
        self._end = bytes(2 * tarfile.BLOCKSIZE)

    @property
    def size(self) -> int:
        """Length of the archive."""
        entries = sum(len(head) + file.bytes + _gap(file.bytes) for file, head in self._entries)
        return entries + len(self._end)

    def pieces(self) -> Iterator[bytes]:
        """The archive, piece by piece."""
        with self._held:
            for file, head in self._entries:
                yield head
                with (self._folder / file.path).open("rb") as source:
                    while piece := source.read(PIECE):
                        yield piece
                yield bytes(_gap(file.bytes))
            yield self._end


def _head(file: ModelFile, at: int) -> bytes:
    info = tarfile.TarInfo(file.path)
    info.size, info.mtime = file.bytes, at
    return info.tobuf(tarfile.PAX_FORMAT)


def _gap(size: int) -> int:
    """Bytes from the end of a file to the next block."""
    return -size % tarfile.BLOCKSIZE
