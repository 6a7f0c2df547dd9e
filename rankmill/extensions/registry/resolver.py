"""Resolves names of models, for processes that ask often and must survive a registry that is away."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from rankmill.extensions.registry.documents import Reference, parse_reference
from rankmill.extensions.registry.registry import Registry, Resolved
from rankmill.jobs.contract.errors import ConfigError, RegistryAway
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.system import system

_FRESH_SECONDS = 5.0
"""Seconds for which an answer of the registry is used again."""

_NUMBERED = re.compile(r"v[0-9]+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    choice: Resolved
    at: float


class Resolver:
    """Resolves ``NAME@ALIAS`` to versions; threads may share it.

    While the registry is away, an alias keeps its last target. The names ``v1``, ``v2``, … do not need a
    registry, because an alias cannot have such a name.

    Parameters
    ----------
    url
        The registry; ``None`` if there is none.
    """

    def __init__(self, url: str | None) -> None:
        self._registry = Registry(url) if url else None
        self._lock = system.Lock()
        self._known: dict[Reference, _Known] = {}

    def choice(self, model: str) -> Resolved | None:
        """The versions that a name stands for; ``None`` if it is not a name in a registry.

        Raises
        ------
        ConfigError
            The name is an alias, but no registry is set.
        InputError
            The registry does not have the version or alias.
        RegistryError
            The registry is damaged, or it is away and the alias is not known yet.
        """
        reference = parse_reference(model)
        if reference is None:
            return None
        with self._lock:
            known = self._known.get(reference)
            if known and _is_fresh(known):
                return known.choice
            choice = self._ask(reference, known)
            self._known[reference] = _Known(choice, system.monotonic())
            return choice

    def knows(self, model: str) -> bool:
        """Whether `choice` answers without asking the registry."""
        reference = parse_reference(model)
        known = None if reference is None else self._known.get(reference)
        return reference is None or (known is not None and _is_fresh(known))

    def pin(self, model: str) -> str:
        """`model`, or the version that it stands for now.

        Raises
        ------
        InputError
            The name stands for several versions; other errors are those of `choice`.
        """
        choice = self.choice(model)
        return model if choice is None else choice.one(model)

    def pinned(self, spec: ScoreSpec) -> ScoreSpec:
        """`spec` with the version that its model stands for now; raises as `pin` does."""
        return spec.model_copy(update={"model": self.pin(spec.model)})

    def _ask(self, reference: Reference, known: _Known | None) -> Resolved:
        if self._registry is None:
            if is_numbered(reference.tag):
                return Resolved(reference.name, {reference.tag: 1.0})
            raise ConfigError(
                f"{reference} names a model in a registry, and none is named: set RANKMILL_REGISTRY, or "
                f"write ./{reference} for a folder of that name"
            )
        try:
            return self._registry.resolve(reference)
        except RegistryAway as error:
            if known is not None:
                logger.warning("%s; %s stays what it was", error, reference)
                return known.choice
            if is_numbered(reference.tag):
                logger.info("%s; workers that have %s can score", error, reference)
                return Resolved(reference.name, {reference.tag: 1.0})
            raise


def _is_fresh(known: _Known) -> bool:
    return system.monotonic() - known.at < _FRESH_SECONDS


def is_numbered(tag: str) -> bool:
    """Whether a tag has the form of a version: ``v1``, ``v2``, …"""
    return bool(_NUMBERED.fullmatch(tag))
