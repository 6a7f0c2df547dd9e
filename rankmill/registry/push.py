"""Pushing a version: it becomes visible when all of it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import InputError, RegistryConflict, RegistryError
from rankmill.jobs.registry.documents import MAX_NOTES, Manifest, content_of
from rankmill.jobs.registry.names import Reference, check_name
from rankmill.jobs.registry.registry import Registry, files_folder, next_version
from rankmill.registry.files import LocalFile, digests, find_files
from rankmill.registry.steps import Steps
from rankmill.registry.trial import Trial


@dataclass(frozen=True)
class Pushed:
    """A version that is in the registry now; ``before``: it was there already."""

    manifest: Manifest
    before: bool


def push(
    registry: Registry,
    folder: Path,
    name: str,
    version: str | None,
    trial: Callable[[Path], Trial],
    steps: Steps,
    *,
    by: str,
    notes: str = "",
    precision: Sequence[dict[str, Any]] | None = None,
) -> Pushed:
    """Try a model, and push it; an interrupted push of the same files continues.

    Parameters
    ----------
    registry, folder, name
        Where it goes, where it is, and what it is called.
    version
        Name of the version; ``None``: the next number, or that of the latest version if it is the same model.
    trial
        Tries the model in a folder.
    steps
        Shows progress.
    by, notes, precision
        Who pushes it, and the rest of the manifest.

    Raises
    ------
    InputError
        The model cannot be scored or is not safe.
    RegistryConflict
        There is, or was, another version of this name, or an alias.
    RegistryAway
        The registry cannot be written.
    """
    check_name(name, "a model")
    if version is not None:
        _check_version(registry, Reference(name, version))
    if len(notes) > MAX_NOTES:
        raise InputError(f"the notes have {len(notes):,} characters; at most {MAX_NOTES:,} fit")
    local = find_files(folder)
    with steps.unmeasured("scoring the examples"):
        found = trial(folder)
    size = sum(file.bytes for file in local)
    with steps.measured("reading", size) as on_bytes:
        files = digests(local, on_bytes)
    content = content_of(files)
    version = version or _free_version(registry, name, content)
    manifest = Manifest(
        name=name,
        version=version,
        content=content,
        files=files,
        family=found.family,
        by=by,
        at=time.time(),
        notes=notes,
        precision=None if precision is None else tuple(precision),
    )
    there = registry.find_manifest(Reference(name, version))
    if there is not None:
        return Pushed(_same(there, manifest), before=True)
    with steps.measured("pushing", size) as on_bytes:
        _upload(registry, manifest, local, on_bytes)
    if not registry.publish(manifest):
        there = registry.manifest(Reference(name, version))
        return Pushed(_same(there, manifest), before=True)
    return Pushed(manifest, before=False)


def _check_version(registry: Registry, reference: Reference) -> None:
    check_name(reference.tag, "a version")
    if registry.was_removed(reference):
        raise RegistryConflict(
            f"{reference} was removed from {registry.url}; a version never changes, so its name is not used "
            "again: push under another"
        )
    if registry.find_alias(reference) is not None:
        raise RegistryConflict(f"{reference} is an alias in {registry.url}; a version needs another name")


def _free_version(registry: Registry, name: str, content: str) -> str:
    """The latest version if it is the same model, or an unfinished push of it; else the next number."""
    taken = registry.taken(name)
    for version in reversed(taken):
        reference = Reference(name, version)
        if registry.was_removed(reference):
            continue
        found = registry.find_manifest(reference)
        if found is not None:
            if found.content == content:
                return version
            break
        if files_folder(content) in registry.folder.names(name, version):
            return version
    return next_version([*taken, *registry.aliases(name)])


def _same(there: Manifest, wanted: Manifest) -> Manifest:
    if there.content != wanted.content:
        raise RegistryConflict(
            f"{there} is in the registry with other files, pushed by {there.by}; a version never changes: "
            "push under another name"
        )
    return there


def _upload(registry: Registry, manifest: Manifest, local: Sequence[LocalFile], on_bytes: Any) -> None:
    path = (manifest.name, manifest.version, files_folder(manifest.content))
    registry.folder.tidy(*path)
    there = registry.folder.sizes(*path)
    for file in local:
        if there.get(file.path) == file.bytes:  # from a push that was interrupted
            on_bytes(file.bytes)
            continue
        registry.folder.upload(file.source, on_bytes, *path, *file.path.split("/"))
        file.check_unchanged()
    there = registry.folder.sizes(*path)
    lacking = [file.path for file in manifest.files if there.get(file.path) != file.bytes]
    if lacking:
        raise RegistryError(f"{lacking[0]} of {manifest} is not whole in {registry.url}; push again")
