"""Reading a registry, and the few writes that change what is visible in it.

``NAME/VERSION/manifest.json`` makes a version visible; its files are in ``NAME/VERSION/files-<content>/``, so
that two writers of one version cannot mix their files. ``NAME/aliases/ALIAS.json`` is an alias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rankmill.jobs.contract.errors import InputError, NotInRegistry, RegistryError
from rankmill.jobs.registry.documents import Alias, Manifest, Target
from rankmill.jobs.registry.folder import Folder
from rankmill.jobs.registry.names import ALIASES, Reference, check_name

_MANIFEST = "manifest.json"
_REMOVED = "removed.json"
"""In the place of a version that was removed: versions never change, so the name is not used again."""


@dataclass(frozen=True)
class Choice:
    """What a reference stands for: the versions of a model with their shares, and the one in their shadow."""

    name: str
    versions: dict[str, float]
    shadow: str | None = None

    @property
    def first(self) -> str:
        """``NAME@VERSION`` of the version with the largest share."""
        return f"{self.name}@{max(self.versions, key=lambda version: self.versions[version])}"

    @property
    def only(self) -> str | None:
        """``NAME@VERSION`` if there is only one."""
        return self.first if len(self.versions) == 1 and not self.shadow else None


class Registry:
    """The models in a folder.

    Parameters
    ----------
    url
        As of `Folder`, which says what all methods raise.
    """

    def __init__(self, url: str) -> None:
        self.folder = Folder(url)
        self.url = self.folder.url

    def models(self) -> list[str]:
        """Names of all models with a version."""
        return [name for name in self.folder.names() if _is_name(name) and self.versions(name)]

    def versions(self, name: str) -> list[str]:
        """Names of a model's versions, ``v2`` before ``v10``."""
        return [each for each in self.taken(name) if self._has(name, each)]

    def taken(self, name: str) -> list[str]:
        """Like `versions`, with those that were removed or whose push has not ended."""
        return sorted(filter(_is_name, self.folder.names(check_name(name, "a model"))), key=_in_order)

    def _has(self, name: str, version: str) -> bool:
        inside = self.folder.names(name, version)
        return _MANIFEST in inside and _REMOVED not in inside

    def find_manifest(self, reference: Reference) -> Manifest | None:
        """The manifest of a version; ``None`` if there is no such version.

        Raises
        ------
        RegistryError
            It is damaged.
        """
        name, version = reference
        raw = self.folder.read(name, version, _MANIFEST)
        if raw is None or self.was_removed(reference):
            return None
        found = Manifest.read(raw, f"the manifest of {reference} in {self.url}")
        if (found.name, found.version) != (name, version):
            raise RegistryError(
                f"the manifest of {reference} in {self.url} is damaged: it is that of {found}"
            )
        return found

    def manifest(self, reference: Reference) -> Manifest:
        """Like `find_manifest`; raises `NotInRegistry` if there is no such version."""
        found = self.find_manifest(reference)
        if found is None:
            raise self._unknown(reference)
        return found

    def was_removed(self, reference: Reference) -> bool:
        """Whether the version was there and is removed."""
        return self.folder.read(*reference, _REMOVED) is not None

    def aliases(self, name: str) -> dict[str, Alias]:
        """A model's aliases, by name."""
        files = self.folder.names(check_name(name, "a model"), ALIASES)
        names = sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))
        found = {each: self.find_alias(Reference(name, each)) for each in names if _is_name(each)}
        return {each: alias for each, alias in found.items() if alias}

    def find_alias(self, reference: Reference) -> Alias | None:
        """An alias; ``None`` if there is no such."""
        name, alias = reference
        raw = self.folder.read(name, ALIASES, f"{alias}.json", most=64 << 10)
        return None if raw is None else Alias.read(raw, f"alias {reference} in {self.url}")

    def resolve(self, reference: Reference) -> Choice:
        """What a version or an alias stands for now; an alias may name another.

        Raises
        ------
        NotInRegistry
            There is no such version or alias.
        RegistryError
            Aliases name each other in a circle, or one names a version that is not there.
        """
        name, tag = reference
        followed: list[str] = []
        while (alias := self.find_alias(Reference(name, tag))) is not None:
            if tag in followed:
                circle = " → ".join([*followed, tag])
                raise RegistryError(f"the aliases of {name} in {self.url} are a circle: {circle}")
            followed.append(tag)
            if len(alias.now.versions) > 1 or alias.now.shadow:
                return self._checked(reference, alias.now)
            (tag,) = alias.now.versions
        try:
            self.manifest(Reference(name, tag))
        except NotInRegistry:
            if not followed:
                raise
            raise RegistryError(f"alias {reference} in {self.url} names {tag}, which is no version") from None
        return Choice(name, {tag: 1.0})

    def _checked(self, reference: Reference, target: Target) -> Choice:
        for version in target.named:
            if self.find_manifest(Reference(reference.name, version)) is None:
                raise RegistryError(f"alias {reference} in {self.url} names {version}, which is no version")
        return Choice(reference.name, target.versions, target.shadow)

    def publish(self, manifest: Manifest) -> bool:
        """Make a version visible whose files are there; ``False`` if another push was faster."""
        return self.folder.create(manifest.written(), manifest.name, manifest.version, _MANIFEST)

    def write_alias(self, reference: Reference, alias: Alias) -> None:
        """Write an alias."""
        self.folder.replace(alias.written(), reference.name, ALIASES, f"{reference.tag}.json")

    def remove_alias(self, reference: Reference) -> None:
        """Remove an alias."""
        self.folder.remove(reference.name, ALIASES, f"{reference.tag}.json")

    def remove(self, reference: Reference, about: bytes) -> None:
        """Remove a version: it is invisible at once, then its files go. `about` is kept in its place."""
        self.folder.replace(about, *reference, _REMOVED)
        for name in self.folder.names(*reference):
            if name != _REMOVED:
                self.folder.remove(*reference, name)

    def _unknown(self, reference: Reference) -> NotInRegistry:
        if self.was_removed(reference):
            return NotInRegistry(
                f"{reference} was removed from the registry {self.url}; name another version"
            )
        there = [*self.versions(reference.name), *self.aliases(reference.name)]
        hint = f"it has {', '.join(there[-10:])}" if there else f"it has no model {reference.name}"
        return NotInRegistry(f"the registry {self.url} has no {reference}; {hint}")


def files_folder(content: str) -> str:
    """Name of the folder of a version's files."""
    return f"files-{content[:16]}"


def _is_name(text: str) -> bool:
    try:
        check_name(text, "")
    except InputError:
        return False
    return True


def _in_order(version: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", version) if part
    ]


def next_version(taken: Iterable[str]) -> str:
    """``v1``, ``v2``, …: the first after all that are taken."""
    numbers = [int(each[1:]) for each in taken if re.fullmatch(r"v[0-9]{1,9}", each)]
    return f"v{max(numbers, default=0) + 1}"
