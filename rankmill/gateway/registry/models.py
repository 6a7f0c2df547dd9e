"""What the gateway does with the registry.

The methods of `Models` wait for disks, networks and workers: call them in a thread.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import redis
from pydantic import BaseModel, ConfigDict, Field

from rankmill.cluster.orders import OrderOutcome
from rankmill.gateway.keys.admission import check_model
from rankmill.gateway.keys.api_keys import ApiKey
from rankmill.gateway.refusals import Refusal, refusal_of
from rankmill.gateway.registry.packing import Packed
from rankmill.gateway.registry.unpacking import Source, unpack
from rankmill.gateway.registry.workspace import workspace
from rankmill.jobs.contract.errors import ConfigError, InputError
from rankmill.jobs.registry.documents import Alias, Manifest, Reference, Target, check_name
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.settings import Settings
from rankmill.lab.offline import ProcessFailed
from rankmill.registry.aliases import (
    NotWarm,
    manifests,
    promote,
    remove_version,
    roll_back,
    set_alias,
    target,
    version_view,
)
from rankmill.registry.push import Pushed, Steps, pull, push
from rankmill.registry.store import RegistryStore
from rankmill.registry.trial import try_model

_TRIAL_SECONDS = 900.0

logger = logging.getLogger(__name__)


class NewTarget(BaseModel):
    """What an alias is to stand for: ``version``, which has what ``split`` leaves of the queries."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(max_length=64)
    split: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict, max_length=20)
    shadow: str | None = Field(None, max_length=64)


class Promotion(NewTarget):
    """The same, after live workers have loaded it, each version within ``wait_seconds``."""

    wait_seconds: float = Field(600, ge=1, le=3600)


class Models:
    """The registry, for those who may manage models.

    Parameters
    ----------
    settings
        They name the registry.
    client
        A client for threads of the server whose workers load models.
    """

    def __init__(self, settings: Settings, client: redis.Redis) -> None:
        assert settings.registry
        self._settings = settings
        self._registry = RegistryStore(settings.registry)
        self._redis = client
        self._pushing = threading.Lock()

    @property
    def most_bytes(self) -> int:
        """Most bytes of an upload."""
        return int(self._settings.gateway_model_gib * 2**30)

    def all(self, key: ApiKey | None) -> list[dict[str, Any]]:
        """The models that the key may use."""
        return [self._view(name) for name in self._registry.models() if key is None or key.may_use(name)]

    def one(self, key: ApiKey | None, name: str) -> dict[str, Any]:
        """A model: its versions and aliases."""
        self._may(key, name)
        found = self._view(name)
        if not found["versions"]:
            raise Refusal("not_found", f"the registry has no model {name}")
        return found

    def version(self, key: ApiKey | None, name: str, version: str) -> dict[str, Any]:
        """A version."""
        return version_view(self._manifest(key, name, version), self._registry.aliases(name))

    def alias(self, key: ApiKey | None, name: str, alias: str) -> dict[str, Any]:
        """An alias: what it stands for now, and what before."""
        return _alias_view(self._alias(key, name, alias), name, alias)

    def push(
        self, key: ApiKey | None, source: Source, name: str, version: str | None, notes: str
    ) -> dict[str, Any]:
        """Unpack what is uploaded, try it, and push it: as the command, with one upload at a time.

        Raises
        ------
        Refusal
            The model cannot be pushed; nothing of it is visible.
        """
        self._may(key, name)
        if version is not None:
            check_name(version, "a version")
        try:
            require_worker_packages()
        except ConfigError as error:
            raise Refusal("unavailable", f"no model can be tried where this gateway runs: {error}") from None
        self._registry.taken(name)  # the registry can be reached
        if not self._pushing.acquire(blocking=False):
            raise Refusal("overloaded", "another model is being uploaded here", retry_after=15)
        try:
            pushed = self._push(source, name, version, notes, _who(key))
        except OSError as error:
            raise Refusal("unavailable", f"the upload cannot be kept: {error.strerror or error}") from None
        finally:
            self._pushing.release()
        logger.info("%s was pushed by %s", pushed.manifest, _who(key))
        return {
            **version_view(pushed.manifest, self._registry.aliases(name)),
            "before": pushed.before,
        }

    def pull(self, key: ApiKey | None, name: str, version: str) -> Packed:
        """Fetch and verify the files of a version, for a tar archive of them."""
        manifest = self._manifest(key, name, version)
        with ExitStack() as stack:
            folder = stack.enter_context(workspace()) / "model"
            try:
                pull(self._registry, manifest, folder, Steps(quiet=True))
            except OSError as error:
                text = error.strerror or error
                raise Refusal("unavailable", f"the model cannot be fetched: {text}") from None
            return Packed(manifest, folder, stack.pop_all())

    def set_alias(self, key: ApiKey | None, name: str, alias: str, asked: NewTarget) -> dict[str, Any]:
        """Let an alias stand for a version from the next run on."""
        called, wanted = self._wanted(key, name, alias, asked)
        return self._said(key, called, set_alias(self._registry, called, wanted))

    def promote(self, key: ApiKey | None, name: str, alias: str, asked: Promotion) -> dict[str, Any]:
        """The same, after all live workers have loaded it; with what became of it in each worker."""
        called, wanted = self._wanted(key, name, alias, asked)
        outcomes: list[OrderOutcome] = []
        try:
            found = promote(
                self._registry, called, wanted, self._redis, wait_seconds=asked.wait_seconds,
                on_outcome=outcomes.append,
            )  # fmt: skip
        except NotWarm as error:
            raise Refusal("backend", str(error)) from None
        return {**self._said(key, called, found), "workers": [each.model_dump() for each in outcomes]}

    def roll_back(self, key: ApiKey | None, name: str, alias: str) -> dict[str, Any]:
        """Let an alias stand for what it stood for before."""
        self._alias(key, name, alias)
        called = Reference(name, alias)
        return self._said(key, called, roll_back(self._registry, called, by=_who(key)))

    def remove_alias(self, key: ApiKey | None, name: str, alias: str) -> dict[str, Any]:
        """Remove an alias."""
        self._alias(key, name, alias)
        self._registry.remove_alias(Reference(name, alias))
        logger.info("alias %s@%s was removed by %s", name, alias, _who(key))
        return {"name": name, "alias": alias, "deleted": True}

    def remove(self, key: ApiKey | None, name: str, version: str) -> dict[str, Any]:
        """Remove a version, unless an alias stands for it or a run uses it."""
        self._manifest(key, name, version)
        remove_version(self._registry, Reference(name, version), self._redis, by=_who(key))
        logger.info("%s@%s was removed by %s", name, version, _who(key))
        return {"name": name, "version": version, "deleted": True}

    def _push(self, source: Source, name: str, version: str | None, notes: str, by: str) -> Pushed:
        with workspace() as folder:
            model = unpack(source, folder / "upload")
            trial = partial(try_model, settings=self._settings, seconds=_TRIAL_SECONDS)
            try:
                return push(
                    self._registry, model, name, version, trial, Steps(quiet=True), by=by, notes=notes
                )
            except (InputError, ProcessFailed) as error:  # the folder means nothing to who has sent the files
                text = str(error).replace(f"{model}/", "").replace(str(model), "the model")
                raise Refusal(refusal_of(error).kind, text) from None

    def _view(self, name: str) -> dict[str, Any]:
        aliases = self._registry.aliases(check_name(name, "a model"))
        return {
            "name": name,
            "versions": [version_view(each, aliases) for each in manifests(self._registry, name)],
            "aliases": [_alias_view(alias, name, each) for each, alias in aliases.items()],
        }

    def _may(self, key: ApiKey | None, name: str) -> None:
        check_model(key, check_name(name, "a model"))

    def _manifest(self, key: ApiKey | None, name: str, version: str) -> Manifest:
        self._may(key, name)
        return self._registry.manifest(Reference(name, check_name(version, "a version")))

    def _alias(self, key: ApiKey | None, name: str, alias: str) -> Alias:
        self._may(key, name)
        found = self._registry.find_alias(Reference(name, check_name(alias, "an alias")))
        if found is None:
            raise Refusal("not_found", f"the registry has no alias {name}@{alias}")
        return found

    def _wanted(
        self, key: ApiKey | None, name: str, alias: str, asked: NewTarget
    ) -> tuple[Reference, Target]:
        self._may(key, name)
        called = Reference(name, check_name(alias, "an alias"))
        version = Reference(name, check_name(asked.version, "a version"))
        return called, target(self._registry, version, asked.split, asked.shadow, by=_who(key))

    def _said(self, key: ApiKey | None, called: Reference, alias: Alias) -> dict[str, Any]:
        logger.info("%s stands for %s, by %s", called, alias.now, _who(key))
        return _alias_view(alias, *called)


def _alias_view(alias: Alias, name: str, called: str) -> dict[str, Any]:
    return {"name": name, "alias": called, **alias.model_dump(exclude={"format"})}


def _who(key: ApiKey | None) -> str:
    """Who does it, as manifests and aliases say it."""
    return f"{key.name} (API key {key.id})" if key else "the gateway, without a key"
