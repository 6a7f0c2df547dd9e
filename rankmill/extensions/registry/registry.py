"""Reads and changes a registry: resolves its names, and fetches and verifies the files of a version.

A registry has three kinds of files:

- ``NAME/VERSION/manifest.json``: lists the files of a version, and makes the version visible;
- ``NAME/VERSION/files-<content>/…``: the files. The folder has their digest in its name, so that two writers
  of one version cannot mix their files;
- ``NAME/aliases/ALIAS.json``: an alias.
"""

from __future__ import annotations

import getpass
import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rankmill.extensions.registry.documents import (
    ALIASES,
    Alias,
    Manifest,
    ModelFile,
    Reference,
    check_name,
    is_name,
)
from rankmill.extensions.registry.folder import PIECE, RegistryFolder
from rankmill.extensions.registry.settings import RegistrySettings
from rankmill.jobs.cache import file_digest
from rankmill.jobs.contract.errors import ConfigError, NotInRegistry, RegistryError
from rankmill.jobs.contract.shown import natural_order
from rankmill.jobs.model_names import Choice
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

MANIFEST = "manifest.json"
REMOVED = "removed.json"
"""Name of the file that stays in the folder of a removed version, so that no other version gets the same
name.
"""


class Registry:
    """Reads and writes the models of a registry.

    Parameters
    ----------
    url
        A path, or a URL of fsspec: ``file://``, ``s3://``, ``gs://``, ``az://``, ``hf://``.

    Raises
    ------
    RegistryAway
        From all methods: the registry's folder cannot be reached, does not exist, or may not be used.
    """

    def __init__(self, url: str) -> None:
        self.folder = RegistryFolder(url)
        self.url = self.folder.url

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The registry that the settings name; raises `ConfigError` if they do not name one."""
        url = settings.of(RegistrySettings).registry
        if not url:
            raise ConfigError(
                "no registry is named: give --registry or set RANKMILL_REGISTRY to its folder or URL"
            )
        return cls(url)

    def models(self) -> list[str]:
        return [name for name in self.folder.names() if is_name(name) and self.versions(name)]

    def versions(self, name: str) -> list[str]:
        """Names of a model's complete versions, ``v2`` before ``v10``."""
        inside = {version: self.folder.names(name, version) for version in self.taken(name)}
        return [version for version, names in inside.items() if MANIFEST in names and REMOVED not in names]

    def taken(self, name: str) -> list[str]:
        """Return the names of a model's versions, including removed versions and unfinished pushes."""
        return sorted(filter(is_name, self.folder.names(check_name(name, "a model"))), key=natural_order)

    def find_manifest(self, reference: Reference) -> Manifest | None:
        """The manifest of a version; ``None`` if the version does not exist or was removed.

        Raises
        ------
        RegistryError
            The manifest is damaged.
        """
        name, version = reference
        raw = self.folder.read(name, version, MANIFEST)
        if raw is None or self.was_removed(reference):
            return None
        manifest = Manifest.read(raw, f"the manifest of {reference} in {self.url}")
        if (manifest.name, manifest.version) != (name, version):
            raise RegistryError(
                f"the manifest of {reference} in {self.url} is damaged: it is that of {manifest}"
            )
        return manifest

    def manifest(self, reference: Reference) -> Manifest:
        """Return the manifest of a version. Raises `NotInRegistry` if the version does not exist, and
        `RegistryError` if the manifest is damaged.
        """
        manifest = self.find_manifest(reference)
        if manifest is not None:
            return manifest
        if self.was_removed(reference):
            raise NotInRegistry(f"{reference} was removed from the registry {self.url}; name another version")
        tags = [*self.versions(reference.name), *self.aliases(reference.name)]
        hint = f"it has {', '.join(tags[-10:])}" if tags else f"it has no model {reference.name}"
        raise NotInRegistry(f"the registry {self.url} has no {reference}; {hint}")

    def was_removed(self, reference: Reference) -> bool:
        return self.folder.read(*reference, REMOVED) is not None

    def aliases(self, name: str) -> dict[str, Alias]:
        files = self.folder.names(check_name(name, "a model"), ALIASES)
        names = sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))
        targets = {alias: self.find_alias(Reference(name, alias)) for alias in names if is_name(alias)}
        return {name: alias for name, alias in targets.items() if alias}

    def find_alias(self, reference: Reference) -> Alias | None:
        name, alias = reference
        raw = self.folder.read(name, ALIASES, f"{alias}.json", most=64 << 10)
        return None if raw is None else Alias.read(raw, f"alias {reference} in {self.url}")

    def alias(self, reference: Reference) -> Alias:
        """Return an alias; raises `NotInRegistry` if it does not exist."""
        alias = self.find_alias(reference)
        if alias is None:
            known = ", ".join(self.aliases(reference.name)) or "none"
            raise NotInRegistry(f"the registry {self.url} has no alias {reference}; the model has {known}")
        return alias

    def resolve(self, reference: Reference) -> Choice:
        """Look up the versions that ``NAME@VERSION`` or ``NAME@ALIAS`` stands for now.

        Raises
        ------
        NotInRegistry
            The version or alias does not exist.
        RegistryError
            The alias names a version that does not exist.
        """
        alias = self.find_alias(reference)
        if alias is None:
            return Choice(reference.name, {str(reference): 1.0}, content=self.manifest(reference).content)
        name, target, contents = reference.name, alias.now, []
        for version in target.named:
            manifest = self.find_manifest(Reference(name, version))
            if manifest is None:
                raise RegistryError(
                    f"alias {reference} in {self.url} names {version}, which is not a version"
                )
            contents.append(manifest.content)
        shares = {f"{name}@{version}": share for version, share in target.versions.items()}
        shadow = target.shadow and f"{name}@{target.shadow}"
        return Choice(name, shares, shadow, contents[0] if len(contents) == 1 else None)

    def version(self, reference: Reference) -> Reference:
        """Return the only version that a version's name or an alias stands for. Raises the errors of
        `resolve`, and `InputError` for an alias that is split or has a shadow.
        """
        return Reference(reference.name, self.resolve(reference).one(reference).rpartition("@")[2])

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
        """Remove a version of a model. First `note` is written, which makes the version invisible. Then the
        files of the version are deleted.
        """
        self.folder.replace(note, *reference, REMOVED)
        for name in self.folder.names(*reference):
            if name != REMOVED:
                self.folder.remove(*reference, name)


def files_folder(content: str) -> str:
    """Name of the folder with the files of a version whose digest is `content`."""
    return f"files-{content[:16]}"


def fetch_files(
    registry: Registry,
    manifest: Manifest,
    target: Path,
    parts: Path,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> None:
    """Copy the files of a version from a registry into a folder, and verify them. Whole files that are there
    already are not copied again.

    Parameters
    ----------
    registry, manifest
        The registry, and the manifest of the version.
    target
        Folder for the files.
    parts
        Folder for unfinished files, on the same file system.
    on_bytes
        Called with the number of bytes of each piece of a file, also for pieces that were there already.

    Raises
    ------
    RegistryError
        A file is missing or has another checksum than in the manifest.
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
        # An interrupted fetch may have left the beginning of a file, and this beginning may be damaged. If
        # the check of such a file fails, the whole file is fetched again.
        for _ in range(2 if part.exists() else 1):
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
    """Fetch the bytes of a file that `part` still lacks; returns the digest of the whole file."""
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
                break  # the file is shorter than its manifest says
        out.flush()
        system.fsync(out.fileno())
    return digest.hexdigest()


def who() -> str:
    """Return the name under which this process changes a registry: the user and the host, ``USER@HOST``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user of a container may lack a name
        user = "?"
    return f"{user}@{socket.gethostname()}"
