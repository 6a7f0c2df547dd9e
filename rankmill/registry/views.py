"""What a registry has, as data: for ``--json`` and for the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankmill.jobs.registry.documents import Alias, Manifest
from rankmill.jobs.registry.names import Reference
from rankmill.jobs.registry.registry import Registry


def manifests(registry: Registry, name: str) -> list[Manifest]:
    """The manifests of all versions of a model."""
    return [registry.manifest(Reference(name, version)) for version in registry.versions(name)]


def called(manifest: Manifest, aliases: Mapping[str, Alias]) -> list[str]:
    """The aliases that name a version, with its share."""
    found = []
    for name, alias in aliases.items():
        share = alias.now.versions.get(manifest.version)
        if share is not None:
            found.append(name if share == 1 else f"{name} {share:.0%}")
        elif manifest.version == alias.now.shadow:
            found.append(f"{name} (shadow)")
    return found


def version_view(manifest: Manifest, aliases: Mapping[str, Alias]) -> dict[str, Any]:
    """A version: its manifest, its size, and the aliases that name it."""
    return {**manifest.model_dump(), "bytes": manifest.bytes, "aliases": called(manifest, aliases)}
