"""Finds the models of a registry by their names; an entry point of ``rankmill.models`` points here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from rankmill.extensions.registry.documents import parse_reference
from rankmill.extensions.registry.registry import Registry
from rankmill.extensions.registry.settings import RegistrySettings
from rankmill.extensions.registry.versions import VersionStore, kept_versions
from rankmill.jobs.cache import KeptFolder
from rankmill.jobs.contract.errors import ConfigError, RegistryAway
from rankmill.jobs.model_names import CacheRoom, Choice, ModelCopy, has_tag
from rankmill.jobs.runtime.settings import WorkerSettings

_NUMBERED = re.compile(r"v[0-9]+")

logger = logging.getLogger(__name__)


class RegistryModels:
    """Finds models in the registry by names such as ``reranker@v3`` or ``reranker@production``.

    ``reranker@v3`` also works without the registry, if a worker has this version already. Aliases never have
    names like ``v3``.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        url = settings.of(RegistrySettings).registry
        self._registry = Registry(url) if url else None

    def owns(self, model: str) -> bool:
        return has_tag(model)

    def choice(self, model: str) -> Choice:
        """Look up the versions that ``NAME@VERSION`` or ``NAME@ALIAS`` stands for now.

        Raises
        ------
        ConfigError
            The settings name no registry, and the tag is not ``v1``, ``v2``, …
        InputError
            The registry does not have this version or alias, or the name is not valid.
        RegistryError
            The registry is damaged.
        RegistryAway
            The registry cannot be reached, and the tag is not ``v1``, ``v2``, …
        """
        reference = parse_reference(model)
        numbered = Choice(reference.name, {model: 1.0}) if is_numbered(reference.tag) else None
        if self._registry is None:
            if numbered:
                return numbered
            raise ConfigError(
                f"{reference} names a model in a registry, and none is named: set RANKMILL_REGISTRY, or "
                f"write ./{reference} for a folder of that name"
            )
        try:
            return self._registry.resolve(reference)
        except RegistryAway as error:
            if numbered is None:
                raise
            logger.info("%s; workers that have %s can score", error, reference)
            return numbered

    def copy(self, model: str, content: str | None, cache: CacheRoom) -> ModelCopy:
        return VersionStore(cache, self._registry).get(parse_reference(model), content)

    def kept(self, cache: Path) -> Iterator[KeptFolder]:
        return kept_versions(cache)


def is_numbered(tag: str) -> bool:
    """Return whether a tag can only be the name of a version, not of an alias: ``v1``, ``v2``, …"""
    return bool(_NUMBERED.fullmatch(tag))
