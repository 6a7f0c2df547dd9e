"""The paths of the registry of models, for keys that may manage models."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.gateway.bodies import parse
from rankmill.gateway.dialects.base import T, read_as
from rankmill.gateway.dialects.shared import SHARED
from rankmill.gateway.http.plain_routes import documented
from rankmill.gateway.http.score_routes import refused
from rankmill.gateway.http.streams import Download
from rankmill.gateway.refusals import EXPECTED, Refusal, refusal_of
from rankmill.gateway.registry.models import Models, NewTarget, Promotion
from rankmill.gateway.registry.reading import UploadedBody, apart
from rankmill.jobs.registry.documents import MAX_NOTES

if TYPE_CHECKING:
    from rankmill.gateway.gateway import Gateway
    from rankmill.gateway.keys.api_keys import ApiKey

_TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_NOTES = [{"name": "notes", "in": "query", "schema": {"type": "string", "maxLength": MAX_NOTES}}]


class Rollback(BaseModel):
    """No fields. It is demanded as JSON, which a page of another site cannot send unasked."""

    model_config = ConfigDict(extra="forbid")


class RegistryRoutes:
    """Answers requests for the registry.

    Parameters
    ----------
    gateway
        The gateway's parts.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def router(self) -> APIRouter:
        """The router of these paths."""
        router = APIRouter()
        model = "/v1/registry/{name}"
        version, alias = model + "/versions/{version}", model + "/aliases/{alias}"
        add = documented(router, "registry")
        tar = {
            "requestBody": {"required": True, "content": _TAR}, "parameters": _NOTES, "statuses": (200, 201)
        }  # fmt: skip
        add("/v1/registry", "GET", "The models of the registry", self.models)
        add(model, "GET", "A model: its versions and aliases", self.model)
        add(model, "PUT", "Push a model, a tar archive, as the next version", self.push, **tar)
        add(version, "GET", "A version: its files, by whom and when", self.version)
        add(version, "PUT", "Push a model, a tar archive, as this version", self.push, **tar)
        add(version, "DELETE", "Remove a version that nothing uses", self.remove)
        add(version + "/archive", "GET", "Pull a version, as a tar archive", self.pull,
            media=("application/x-tar",))  # fmt: skip
        add(alias, "GET", "What an alias stands for, now and before", self.alias)
        add(alias, "PUT", "Let an alias stand for a version", self.set_alias, **_body(NewTarget))
        add(alias, "DELETE", "Remove an alias", self.remove_alias)
        add(alias + "/promote", "POST", "Have live workers load a version, then set the alias", self.promote,
            **_body(Promotion))  # fmt: skip
        add(alias + "/rollback", "POST", "Let an alias stand for what it stood for before", self.roll_back,
            **_body(Rollback))  # fmt: skip
        return router

    async def models(self, request: Request) -> Response:
        """All models."""
        key, known = await self._known(request)
        return JSONResponse({"object": "list", "data": await asyncio.to_thread(known.all, key)})

    async def model(self, request: Request) -> Response:
        """A model."""
        key, known = await self._known(request)
        return JSONResponse(await asyncio.to_thread(known.one, key, _named(request, "name")))

    async def push(self, request: Request) -> Response:
        """Push what is uploaded."""
        try:
            key, known = await self._known(request)
            version, notes = request.path_params.get("version"), request.query_params.get("notes", "")
            body, name = UploadedBody(request, known.most_bytes), _named(request, "name")
            async with self._gateway.admission.admitted(key, name):
                pushed = await apart(known.push, key, body, name, version, notes)
            return JSONResponse(pushed, 200 if pushed["before"] else 201)
        except EXPECTED as error:
            answer = refused(SHARED, refusal_of(error))
            answer.headers["Connection"] = "close"  # the body may not have been read to its end
            return answer

    async def version(self, request: Request) -> Response:
        """A version."""
        key, known = await self._known(request)
        named = _named(request, "name"), _named(request, "version")
        return JSONResponse(await asyncio.to_thread(known.version, key, *named))

    async def pull(self, request: Request) -> Response:
        """The files of a version."""
        key, known = await self._known(request)
        name, version = _named(request, "name"), _named(request, "version")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gateway.admission.admitted(key, name))
            packed = await apart(known.pull, key, name, version)
            headers = {"content-length": str(packed.size)}
            return Download(packed.pieces(), stack.pop_all(), headers, "application/x-tar")

    async def remove(self, request: Request) -> Response:
        """Remove a version."""
        key, known = await self._known(request)
        named = _named(request, "name"), _named(request, "version")
        return JSONResponse(await asyncio.to_thread(known.remove, key, *named))

    async def alias(self, request: Request) -> Response:
        """An alias."""
        key, known = await self._known(request)
        return JSONResponse(await asyncio.to_thread(known.alias, key, *_alias(request)))

    async def set_alias(self, request: Request) -> Response:
        """Set an alias."""
        key, known = await self._known(request)
        asked = await self._read(request, NewTarget)
        return JSONResponse(await asyncio.to_thread(known.set_alias, key, *_alias(request), asked))

    async def remove_alias(self, request: Request) -> Response:
        """Remove an alias."""
        key, known = await self._known(request)
        return JSONResponse(await asyncio.to_thread(known.remove_alias, key, *_alias(request)))

    async def promote(self, request: Request) -> Response:
        """Set an alias after workers have loaded the version."""
        key, known = await self._known(request)
        asked = await self._read(request, Promotion)
        return JSONResponse(await apart(known.promote, key, *_alias(request), asked))

    async def roll_back(self, request: Request) -> Response:
        """Set an alias to what it stood for before."""
        key, known = await self._known(request)
        await self._read(request, Rollback)
        return JSONResponse(await asyncio.to_thread(known.roll_back, key, *_alias(request)))

    async def _known(self, request: Request) -> tuple[ApiKey | None, Models]:
        """The key of the request, and the registry.

        Raises
        ------
        Refusal
            The key may not manage models, or there is no registry.
        """
        key = await self._gateway.manager(request)
        if self._gateway.models is None:
            raise Refusal(
                "not_found", "this gateway has no registry: it needs the setting registry (RANKMILL_REGISTRY)"
            )
        return key, self._gateway.models

    async def _read(self, request: Request, kind: type[T]) -> T:
        with self._gateway.bodies.hold() as held:
            return read_as(kind, parse(await held.read(request)))


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _named(request: Request, part: str) -> str:
    return str(request.path_params[part])


def _alias(request: Request) -> tuple[str, str]:
    return _named(request, "name"), _named(request, "alias")
