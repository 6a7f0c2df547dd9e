"""Finds the model and its files for a name that an extension knows. Such a name may be NAME@VERSION.

A package adds such names by an entry point of the group ``rankmill.models``, which names a class with the
methods of `NamedModels`. The class is called with the settings. A name that an extension knows contains an
``@`` or a ``:``. Ids on the hub and ``demo`` contain neither of the two, and paths are recognized by their
first character. So rankmill imports no extension for ids on the hub, ``demo`` and paths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from rankmill import plugins
from rankmill.jobs.cache import KeptFolder, Locked
from rankmill.jobs.contract.errors import ConfigError, InputError, RegistryAway
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.jobs.system import system

_FRESH_SECONDS = 5.0
"""For this many seconds, an extension's answer about a name is used again without asking the extension."""

_PATHS = ("/", ".", "~")
"""A name that begins with one of these is a path."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The models that a name stands for, and their shares of the queries.

    Attributes
    ----------
    name
        A name that stays the same when a version or an alias changes. A digest of this name and a query
        decides which model scores the query. So while the shares stay the same, each query keeps its model.
    shares
        The share of each model, by its name; they add up to 1.
    shadow
        A model that scores the same queries for comparison; its scores are not returned.
    content
        The digest of the model's files, if the name stands for one model and the digest is known. Workers
        that have other files leave the run to other workers.
    """

    name: str
    shares: Mapping[str, float]
    shadow: str | None = None
    content: str | None = None

    @property
    def only(self) -> str | None:
        return next(iter(self.shares)) if len(self.shares) == 1 and not self.shadow else None

    def one(self, given: object) -> str:
        """Return the one model that the name stands for.

        Raises
        ------
        InputError
            The name stands for several models; the message has the name as the user has `given` it.
        """
        if self.only is None:
            first = max(self.shares, key=lambda model: self.shares[model])
            shown = ", ".join([*self.shares, *([self.shadow] if self.shadow else [])])
            raise InputError(f"{given} stands for several versions ({shown}); name one, as {first}")
        return self.only


@dataclass(frozen=True)
class ModelCopy:
    """A model's folder on this host, and the digest of its content.

    Until ``held`` is closed, it keeps other processes from removing the folder.
    """

    folder: Path
    content: str
    held: Locked | None = None


class CacheRoom(Protocol):
    """The cache folder of a worker's host."""

    @property
    def folder(self) -> Path:
        """The path of the cache folder, in which each extension has a folder of its own name."""

    def make_room(self, needed: int = 0, keep: Path | None = None) -> int:
        """Remove the folders that were unused for longest, until `needed` more bytes fit into the cache.

        If `needed` alone exceeds the cache's limit, nothing is removed. The folder `keep` stays, and its
        bytes are not counted. Returns the number of bytes that still do not fit.
        """


class NamedModels(Protocol):
    """Models that an extension knows by name. Threads share the object."""

    def owns(self, model: str) -> bool:
        """Return whether a model's name has the form of this extension's names. Only the name is read."""

    def choice(self, model: str) -> Choice:
        """Return the models that a name stands for now. Producers call this.

        Raises
        ------
        RegistryAway
            The service that knows the name cannot be reached.
        RankmillError
            The name stands for nothing.
        """

    def copy(self, model: str, content: str | None, cache: CacheRoom) -> ModelCopy:
        """Return a copy on this host of the model's files. If this host does not have them, they are fetched
        first. Workers call this.

        Parameters
        ----------
        model
            A name that `choice` gave.
        content
            The digest that the files must have, if it is known.
        cache
            The cache folder in which the files may be stored.

        Raises
        ------
        InputError
            No worker could ever have the model's files.
        WorkerError
            This worker cannot get the files; another worker may.
        """

    def kept(self, cache: Path) -> Iterable[KeptFolder]:
        """Return the folders that this extension has in a worker's `cache`, and that may be removed."""


MakeModels = Callable[[WorkerSettings], NamedModels]
"""What an entry point of ``rankmill.models`` names: a class or function that is called with the settings."""


def _installed() -> Iterable[MakeModels]:
    return plugins.load_all("rankmill.models")


def has_tag(model: str) -> bool:
    """Return whether a model's name is NAME@TAG. A folder with such a name must be given as a path.

    >>> has_tag("reranker@production"), has_tag("./reranker@production"), has_tag("org/reranker")
    (True, False, False)
    """
    return "@" in model and not model.startswith(_PATHS) and not ("/" in model and Path(model).is_dir())


def unknown_name(model: str) -> str:
    """Make the error message for a name such as NAME@TAG, if no installed package knows such names."""
    return (
        f"{model} names a version of a model, and no installed package knows such names: install rankmill "
        f"with its registry, name a model on the hub, or write ./{model} for a folder of that name"
    )


def _may_be_owned(model: str) -> bool:
    return not model.startswith(_PATHS) and bool({"@", ":"} & set(model))


@dataclass(frozen=True)
class _Known:
    choice: Choice
    at: float

    @property
    def is_fresh(self) -> bool:
        return system.monotonic() - self.at < _FRESH_SECONDS


class ModelNames:
    """Asks extensions which models a name stands for. Threads may share the object.

    An extension's answer about a name is used again for some seconds. While another thread asks the extension
    anew, or while the extension cannot reach its service, the old answer is used for longer.

    Parameters
    ----------
    settings
        The settings, including those of extensions.
    extensions
        Returns the extensions' classes, by default the entry points of ``rankmill.models``. It is called
        once, for the first name that an extension may know.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        extensions: Callable[[], Iterable[MakeModels]] = _installed,
    ) -> None:
        self._settings, self._extensions = settings, extensions
        self._lock = system.Lock()
        self._known: dict[str, _Known] = {}
        self._asked: set[str] = set()
        """Names about which a thread is asking an extension now. Other threads use the last answer."""

    @cached_property
    def owners(self) -> tuple[NamedModels, ...]:
        return tuple(make(self._settings) for make in self._extensions())

    def owner(self, model: str) -> NamedModels | None:
        """Return the extension that knows a name, or ``None`` if no extension does."""
        if not _may_be_owned(model):
            return None
        return next((owner for owner in self.owners if owner.owns(model)), None)

    def choice(self, model: str) -> Choice | None:
        """Return the models that a name stands for, or ``None`` for ``demo``, a path or an id on the hub.

        Raises
        ------
        ConfigError
            The name is NAME@TAG, but no extension that is installed and set up knows such names.
        InputError
            The name stands for nothing.
        RegistryAway
            The service that knows the name cannot be reached, and has not answered for this name before.
        """
        owner = self.owner(model)
        if owner is None:
            if has_tag(model):
                raise ConfigError(unknown_name(model))
            return None
        # Look without the lock, because another thread may hold the lock while it asks an extension.
        if choice := self._at_hand(model):
            return choice
        self._asked.add(model)
        try:
            with self._lock:
                kept = self._known.get(model)
                if kept and kept.is_fresh:
                    return kept.choice
                try:
                    choice = owner.choice(model)
                except RegistryAway as error:
                    if kept is None:
                        raise
                    logger.warning("%s; %s stays what it was", error, model)
                    choice = kept.choice
                self._known[model] = _Known(choice, system.monotonic())
                return choice
        finally:
            self._asked.discard(model)

    def answers_at_once(self, model: str) -> bool:
        """Return whether `choice` can tell what the name `model` stands for without asking an extension."""
        return not _may_be_owned(model) or self._at_hand(model) is not None

    def _at_hand(self, model: str) -> Choice | None:
        kept = self._known.get(model)
        return kept.choice if kept and (kept.is_fresh or model in self._asked) else None

    def pin(self, model: str) -> str:
        """Return the one model that a name stands for now: ``reranker@production`` becomes ``reranker@v2``.

        ``demo``, a path or an id on the hub is returned as it is.

        Raises
        ------
        InputError
            The name stands for several models, or for nothing.
        """
        choice = self.choice(model)
        return model if choice is None else choice.one(model)

    def pinned(self, spec: ScoreSpec) -> ScoreSpec:
        """Return a copy of `spec` with the model that its name stands for now.

        If `spec` has no revision, the copy gets the digest of the model's content, if that is known. With
        ``demo``, a path or an id on the hub, `spec` is returned as it is. Raises as `pin` does.
        """
        choice = self.choice(spec.model)
        if choice is None:
            return spec
        facts = {"model": choice.one(spec.model), "revision": spec.revision or choice.content}
        return spec.model_copy(update=facts)
