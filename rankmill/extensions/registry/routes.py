"""Adds HTTP paths for the registry of models to the gateway, for callers whose key may manage models.

The work for a request is done in a thread, because the work waits for disks, networks and workers.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.cluster.orders import OrderOutcome
from rankmill.extensions.gateway.bodies import UploadedBody
from rankmill.extensions.gateway.gateway import Addition, Gateway, in_own_thread
from rankmill.extensions.gateway.http.dependencies import (
    Caller,
    ModelManager,
    TheGateway,
    from_json,
    new_router,
)
from rankmill.extensions.gateway.http.document import body, json_body
from rankmill.extensions.gateway.http.responses import download
from rankmill.extensions.gateway.keys.admission import check_model
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.refusals import Refusal, hide, refusal_of
from rankmill.extensions.lab.ask import ProcessFailed
from rankmill.extensions.registry.aliases import (
    NotWarm,
    manifests,
    promote,
    remove_version,
    roll_back,
    set_alias,
    target,
    version_view,
)
from rankmill.extensions.registry.archives import ModelArchive, unpack
from rankmill.extensions.registry.documents import MAX_NOTES, Alias, Reference, Target, check_name
from rankmill.extensions.registry.push import pull, push, try_model
from rankmill.extensions.registry.registry import Registry
from rankmill.extensions.registry.settings import RegistrySettings
from rankmill.jobs.cache import temporary_folder
from rankmill.jobs.contract.errors import ConfigError, InputError
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_TRIAL_SECONDS = 900.0

_MODEL = "/{name}"
_VERSION = "/{name}/versions/{version}"
_ALIAS = "/{name}/aliases/{alias}"

_pushing = system.Lock()
"""Locked while an uploaded model is unpacked, tried and pushed: the gateway takes one model at a time."""

logger = logging.getLogger(__name__)
router = new_router("registry", "/v1/registry")


class RegistryPaths(Addition):
    """Serves the registry of models over HTTP, if the settings name a registry. Error messages hide the
    registry's folder or URL from callers.
    """

    router = router

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        url = settings.of(RegistrySettings).registry
        self.store = Registry(url) if url else None

    def attach(self, gateway: Gateway) -> None:
        if self.store:
            url = self.store.url
            gateway.names |= {f"the registry {url}": "the registry", url: "the registry"}


class NewTarget(BaseModel):
    """The body of a request that sets an alias. ``split`` has the shares of other versions, and ``version``
    gets the rest of the queries.
    """

    model_config = ConfigDict(extra="forbid")

    version: str = Field(max_length=64)
    split: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict, max_length=20)
    shadow: str | None = Field(None, max_length=64)


class Promotion(NewTarget):
    """The body of a request that sets an alias after live workers have loaded the versions. Each version must
    be loaded within ``wait_seconds``.
    """

    wait_seconds: float = Field(600, ge=1, le=3600)


class Rollback(BaseModel):
    """The empty JSON object that a request must send to roll back an alias. Do not accept a request without
    this object: a web page of another site could send such a request.
    """

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class ManagedModel:
    """A model of the registry, and the caller who manages it."""

    gateway: Gateway
    registry: Registry
    key: ApiKey | None
    name: str

    @property
    def by(self) -> str:
        """Name of the caller, as manifests and aliases record it."""
        return f"{self.key.name} (API key {self.key.id})" if self.key else "the gateway, without a key"

    def version(self, version: str) -> Reference:
        return Reference(self.name, check_name(version, "a version"))

    def alias(self, alias: str) -> Reference:
        return Reference(self.name, check_name(alias, "an alias"))

    def target(self, wanted: NewTarget) -> Target:
        version = self.version(wanted.version)
        return target(self.registry, version, wanted.split, wanted.shadow, by=self.by)

    def changed(self, reference: Reference, alias: Alias) -> dict[str, Any]:
        logger.info("%s stands for %s, by %s", reference, alias.now, self.by)
        return _alias_view(alias, *reference)


async def _registry(gateway: TheGateway, key: ModelManager) -> Registry:
    store = gateway.addition(RegistryPaths).store
    if store is None:
        raise Refusal("not_found", "this gateway has no registry of models; its setting registry names one")
    return store


TheRegistry = Annotated[Registry, Depends(_registry)]


async def _model(gateway: TheGateway, registry: TheRegistry, key: Caller, name: str) -> ManagedModel:
    check_model(key, (check_name(name, "a model"),))
    return ManagedModel(gateway, registry, key, name)


TheModel = Annotated[ManagedModel, Depends(_model)]


@router.get("", summary="The models of the registry")
def list_models(registry: TheRegistry, key: Caller) -> dict[str, Any]:
    """The models of the registry that the caller's key may use."""
    names = [name for name in registry.models() if key is None or key.may_use(name)]
    return {"object": "list", "data": [_model_view(registry, name) for name in names]}


@router.get(_MODEL, summary="A model: its versions and aliases")
def find_model(model: TheModel) -> dict[str, Any]:
    """The versions and aliases of a model."""
    view = _model_view(model.registry, model.name)
    if not view["versions"]:
        raise Refusal("not_found", f"the registry has no model {model.name}")
    return view


_TAR: dict[str, Any] = {
    "openapi_extra": body("application/x-tar", {"type": "string", "format": "binary"}),
    "responses": {201: {"description": "A new version", "content": {"application/json": {}}}},
}
Notes = Annotated[str, Query(max_length=MAX_NOTES)]


@router.put(_MODEL, summary="Push a model, a tar archive, as the next version", **_TAR)
async def push_next(request: Request, model: TheModel, notes: Notes = "") -> Response:
    """Push an uploaded model as the next version."""
    return await _push_upload(request, model, None, notes)


@router.put(_VERSION, summary="Push a model, a tar archive, as this version", **_TAR)
async def push_version(request: Request, model: TheModel, version: str, notes: Notes = "") -> Response:
    """Push an uploaded model as a version with this name."""
    return await _push_upload(request, model, model.version(version).tag, notes)


async def _push_upload(request: Request, model: ManagedModel, version: str | None, notes: str) -> Response:
    gib = model.gateway.settings.of(RegistrySettings).gateway_model_gib
    upload = UploadedBody(request, int(gib * 2**30), f"the model is larger than {gib:g} GiB, the most here")
    async with model.gateway.admission.admitted(model.key):
        pushed = await in_own_thread(_push, model, upload, version, notes)
    return JSONResponse(pushed, 200 if pushed["before"] else 201)


def _push(model: ManagedModel, upload: UploadedBody, version: str | None, notes: str) -> dict[str, Any]:
    """Unpack an uploaded model, try it, and push it. While one upload is unpacked, tried and pushed, other
    uploads are refused.

    Raises
    ------
    Refusal
        The model was not pushed; the message says why.
    """
    registry = model.registry
    try:
        require_worker_packages()
    except ConfigError as error:
        logger.warning("no model can be tried here: %s", error)
        raise Refusal(
            "unavailable", "no model can be tried where this gateway runs; push it with: rankmill models push"
        ) from None
    registry.taken(model.name)  # raises if the registry cannot be reached
    if not _pushing.acquire(blocking=False):
        raise Refusal(
            "overloaded", "another model is being uploaded here; send it again later", retry_after=15
        )
    try:
        with temporary_folder("rankmill-upload-") as place:
            folder = unpack(upload, place / "upload")
            trial = partial(try_model, settings=model.gateway.settings, seconds=_TRIAL_SECONDS)
            try:
                manifest, before = push(
                    registry, folder, model.name, version, trial, by=model.by, notes=notes
                )
            except InputError as error:
                # Do not send the error as it is: callers must not see the path of `folder` on this host.
                text = hide({**model.gateway.names, f"{folder}/": "", str(folder): "the model"}, str(error))
                raise Refusal(refusal_of(error).kind, text) from None
            except ProcessFailed as error:
                logger.warning("%s", error)
                text = "the model cannot be tried here: it takes too long, or more memory than there is"
                raise Refusal("unavailable", text) from None
    except OSError as error:
        raise _disk_refusal("the upload cannot be kept", error) from None
    finally:
        _pushing.release()
    logger.info("%s was pushed by %s", manifest, model.by)
    return {**version_view(manifest, registry.aliases(model.name)), "before": before}


@router.get(_VERSION, summary="A version: its files, by whom and when")
def find_version(model: TheModel, version: str) -> dict[str, Any]:
    """The manifest of a version, and the aliases that name the version."""
    manifest = model.registry.manifest(model.version(version))
    return version_view(manifest, model.registry.aliases(model.name))


@router.delete(_VERSION, summary="Remove a version that nothing uses")
def delete_version(model: TheModel, version: str) -> dict[str, Any]:
    """Remove a version, unless an alias stands for it or a run uses it."""
    reference = model.version(version)
    remove_version(model.registry, reference, model.gateway.plain_redis, by=model.by)
    logger.info("%s was removed by %s", reference, model.by)
    return {"name": model.name, "version": version, "deleted": True}


@router.get(
    _VERSION + "/archive", summary="Pull a version, as a tar archive", response_class=Response,
    responses={200: {"content": {"application/x-tar": {}}}},
)  # fmt: skip
async def pull_version(model: TheModel, version: str) -> Response:
    """The files of a version, as a tar archive."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(model.gateway.admission.admitted(model.key))
        archive = await in_own_thread(_pull, model, version)
        headers = {"content-length": str(archive.size)}
        return download(archive.pieces(), stack.pop_all(), headers, "application/x-tar")


def _pull(model: ManagedModel, version: str) -> ModelArchive:
    manifest = model.registry.manifest(model.version(version))
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("rankmill-upload-")) / "model"
        try:
            pull(model.registry, manifest, folder)
        except OSError as error:
            raise _disk_refusal("the model cannot be fetched", error) from None
        return ModelArchive(manifest, folder, stack.pop_all())


@router.get(_ALIAS, summary="What an alias stands for, now and before")
def find_alias(model: TheModel, alias: str) -> dict[str, Any]:
    """The present and the earlier targets of an alias."""
    reference = model.alias(alias)
    return _alias_view(model.registry.alias(reference), *reference)


@router.put(_ALIAS, summary="Let an alias stand for a version", openapi_extra=json_body(NewTarget))
def put_alias(
    model: TheModel, alias: str, wanted: Annotated[NewTarget, from_json(NewTarget)]
) -> dict[str, Any]:
    """Let an alias stand for a version from the next run on."""
    reference = model.alias(alias)
    return model.changed(reference, set_alias(model.registry, reference, model.target(wanted)))


@router.delete(_ALIAS, summary="Remove an alias")
def delete_alias(model: TheModel, alias: str) -> dict[str, Any]:
    """Remove an alias."""
    reference = model.alias(alias)
    model.registry.alias(reference)  # raises if the alias does not exist
    model.registry.remove_alias(reference)
    logger.info("alias %s was removed by %s", reference, model.by)
    return {"name": model.name, "alias": alias, "deleted": True}


@router.post(
    _ALIAS + "/promote", summary="Let live workers load a version, then set the alias",
    openapi_extra=json_body(Promotion),
)  # fmt: skip
async def promote_version(
    model: TheModel, alias: str, wanted: Annotated[Promotion, from_json(Promotion)]
) -> dict[str, Any]:
    """Set an alias after workers have loaded the version; returns the outcome at each worker."""
    return await in_own_thread(_promote, model, alias, wanted)


def _promote(model: ManagedModel, alias: str, wanted: Promotion) -> dict[str, Any]:
    reference = model.alias(alias)
    outcomes: list[OrderOutcome] = []
    try:
        changed = promote(
            model.registry, reference, model.target(wanted), model.gateway.plain_redis,
            wait_seconds=wanted.wait_seconds, on_outcome=outcomes.append,
        )  # fmt: skip
    except NotWarm as error:
        logger.warning("%s", error)
        raise Refusal(
            "backend",
            f"{reference} is unchanged: not all workers have loaded the version; the gateway's log says why",
        ) from None
    return {**model.changed(reference, changed), "workers": [outcome.model_dump() for outcome in outcomes]}


@router.post(
    _ALIAS + "/rollback", summary="Return an alias to its previous version",
    openapi_extra=json_body(Rollback),
)  # fmt: skip
def roll_back_alias(
    model: TheModel, alias: str, order: Annotated[Rollback, from_json(Rollback)]
) -> dict[str, Any]:
    """Return an alias to its previous version."""
    reference = model.alias(alias)
    return model.changed(reference, roll_back(model.registry, reference, by=model.by))


def _disk_refusal(problem: str, error: OSError) -> Refusal:
    logger.warning("%s: %s", problem, error)
    return Refusal("unavailable", f"{problem}: {error.strerror}" if error.strerror else problem)


def _model_view(registry: Registry, name: str) -> dict[str, Any]:
    aliases = registry.aliases(check_name(name, "a model"))
    return {
        "name": name,
        "versions": [version_view(manifest, aliases) for manifest in manifests(registry, name)],
        "aliases": [_alias_view(alias, name, called) for called, alias in aliases.items()],
    }


def _alias_view(alias: Alias, name: str, called: str) -> dict[str, Any]:
    return {"name": name, "alias": called, **alias.model_dump(exclude={"format"})}
