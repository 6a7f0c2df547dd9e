"""Fetching the files of a version: each is verified, and what an interrupted fetch left is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from rankmill.jobs.cache.digests import file_digest
from rankmill.jobs.contract.errors import RegistryError
from rankmill.jobs.registry.documents import Manifest, ModelFile
from rankmill.jobs.registry.folder import PIECE
from rankmill.jobs.registry.registry import Registry, files_folder


def fetch_files(
    registry: Registry,
    manifest: Manifest,
    target: Path,
    parts: Path,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Fetch what `target` lacks of a version's files.

    Parameters
    ----------
    registry, manifest
        Where the version is, and its manifest.
    target, parts
        Folders of the whole files and of unfinished ones, on one file system.
    on_bytes
        Called with the size of each piece that is there.

    Raises
    ------
    RegistryError
        A file is not there or has another checksum than in the manifest.
    RegistryAway
        The registry cannot be reached.
    OSError
        A file cannot be written.
    """
    parts.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        whole = target / file.path
        if whole.is_file() and file_digest(whole) == file.sha256:
            on_bytes(file.bytes)
            continue
        part = parts / file.sha256
        for _ in range(2 if part.exists() else 1):  # what an interrupted fetch left may be damaged
            if _fetch(registry, manifest, file, part, on_bytes) == file.sha256:
                break
            part.unlink()
        else:
            raise RegistryError(
                f"{file.path} of {manifest} in {registry.url} is not what its manifest says (another "
                "checksum); remove this version and push it under a new name"
            )
        whole.parent.mkdir(parents=True, exist_ok=True)
        part.replace(whole)


def _fetch(
    registry: Registry, manifest: Manifest, file: ModelFile, part: Path, on_bytes: Callable[[int], None]
) -> str:
    """Fetch what `part` lacks of a file; the digest of the whole."""
    path = (manifest.name, manifest.version, files_folder(manifest.content), *file.path.split("/"))
    digest = hashlib.sha256()
    with part.open("a+b") as out:
        out.seek(0)
        while piece := out.read(PIECE):
            digest.update(piece)
            on_bytes(len(piece))
        while (start := out.tell()) < file.bytes:
            wanted = min(PIECE, file.bytes - start)
            piece = registry.folder.read_piece(start, start + wanted, *path)
            out.write(piece)
            digest.update(piece)
            on_bytes(len(piece))
            if len(piece) < wanted:
                break  # it is shorter than its manifest says
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()
