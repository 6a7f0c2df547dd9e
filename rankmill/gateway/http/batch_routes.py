"""The paths of files and batches, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rankmill.gateway.batches.records import BatchRecord, FileRecord
from rankmill.gateway.batches.service import Batches, NewBatch
from rankmill.gateway.batches.views import ENDED, file_view, page
from rankmill.gateway.bodies import parse
from rankmill.gateway.dialects.base import read_as
from rankmill.gateway.dialects.shared import SHARED
from rankmill.gateway.http.plain_routes import documented
from rankmill.gateway.http.streams import Download
from rankmill.gateway.http.uploads import uploaded
from rankmill.gateway.keys.admission import MOST_WAIT
from rankmill.gateway.refusals import EXPECTED, Refusal, refusal_of
from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.runtime.patience import waiting

if TYPE_CHECKING:
    from rankmill.gateway.gateway import Gateway

_LOOK_SECONDS = 0.5
_ALIVE_SECONDS = 15
"""How often a stream of events says that it is there, if nothing else does."""

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
    },
}

_PAGE = [
    {"name": name, "in": "query", "schema": {"type": kind}}
    for name, kind in (("after", "string"), ("limit", "integer"), ("order", "string"), ("purpose", "string"))
]


class BatchRoutes:
    """Answers requests for files and batches.

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
        add = documented(router, "batches")
        form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
        batch = {"application/json": {"schema": NewBatch.model_json_schema()}}
        add("/v1/files", "POST", "Upload the file of a batch", self.upload, **form)
        add("/v1/files", "GET", "The files, the latest first", self.files, parameters=_PAGE)
        add("/v1/files/{id}", "GET", "A file", self.file)
        add("/v1/files/{id}", "DELETE", "Delete a file", self.delete)
        add("/v1/files/{id}/content", "GET", "The bytes of a file", self.content,
            media=("application/octet-stream",))  # fmt: skip
        add("/v1/batches", "POST", "Submit a batch", self.create,
            requestBody={"required": True, "content": batch})  # fmt: skip
        add("/v1/batches", "GET", "The batches, the latest first", self.batches, parameters=_PAGE[:2])
        add("/v1/batches/{id}", "GET", "A batch", self.batch)
        add("/v1/batches/{id}/cancel", "POST", "Cancel a batch", self.cancel)
        add("/v1/batches/{id}/events", "GET", "A batch's progress, as server-sent events", self.events,
            media=("text/event-stream",))  # fmt: skip
        return router

    async def upload(self, request: Request) -> Response:
        """Keep a file."""
        key, known = await self._gateway.key(request), self._known
        async with self._gateway.admission.admitted(key), uploaded(request, known.most_bytes) as file:
            name, size = file.filename or "", file.size or 0
            kept = await asyncio.to_thread(known.upload, key, name, file.file, size)
        return JSONResponse(file_view(kept))

    async def files(self, request: Request) -> Response:
        """A page of the files."""
        key = await self._gateway.key(request)
        found = await asyncio.to_thread(self._known.all, FileRecord, key)
        if purpose := request.query_params.get("purpose"):
            found = [file for file in found if file.purpose == purpose]
        oldest_first = request.query_params.get("order") == "asc"
        return JSONResponse(page(found, file_view, *_asked_page(request, 10_000), oldest_first=oldest_first))

    async def file(self, request: Request) -> Response:
        """A file."""
        key = await self._gateway.key(request)
        found = await asyncio.to_thread(self._known.find, FileRecord, key, _id(request))
        return JSONResponse(file_view(found))

    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        key = await self._gateway.key(request)
        await asyncio.to_thread(self._known.delete, key, _id(request))
        return JSONResponse({"id": _id(request), "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The bytes of a file."""
        key, known = await self._gateway.key(request), self._known
        found = await asyncio.to_thread(known.find, FileRecord, key, _id(request))
        headers = {
            "Content-Length": str(found.bytes),
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.name)}",
            "X-Content-Type-Options": "nosniff",
        }
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._gateway.admission.admitted(key))
            blocks = await asyncio.to_thread(known.content, found)
            return Download(blocks, stack.pop_all(), headers, "application/octet-stream")

    async def create(self, request: Request) -> Response:
        """Submit a batch."""
        key, known = await self._gateway.key(request), self._known
        with self._gateway.bodies.hold() as held:
            asked = read_as(NewBatch, parse(await held.read(request)))
        scoring = self._gateway.scoring
        if asked.model:
            scoring.model(asked.model)
        made = await asyncio.to_thread(known.create, key, asked, scoring.model)
        return JSONResponse(made)

    async def batches(self, request: Request) -> Response:
        """A page of the batches."""
        key, known = await self._gateway.key(request), self._known
        found = await asyncio.to_thread(known.all, BatchRecord, key)
        asked = _asked_page(request, 100, usual=20)
        return JSONResponse(await asyncio.to_thread(lambda: page(found, known.view, *asked)))

    async def batch(self, request: Request) -> Response:
        """A batch."""
        key, known = await self._gateway.key(request), self._known
        found = await asyncio.to_thread(known.find, BatchRecord, key, _id(request))
        return JSONResponse(await asyncio.to_thread(known.view, found))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch."""
        key = await self._gateway.key(request)
        return JSONResponse(await asyncio.to_thread(self._known.cancel, key, _id(request)))

    async def events(self, request: Request) -> Response:
        """The batch whenever it changes, until its end."""
        key, known = await self._gateway.key(request), self._known
        found = await asyncio.to_thread(known.find, BatchRecord, key, _id(request))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        events = self._events(known, found)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(self, known: Batches, batch: BatchRecord) -> AsyncIterator[str]:
        """Each state of a batch as an event ``batch``, and the last one as ``done``; or ``error``."""
        last, told = "", time.monotonic()
        while not self._gateway.is_stopping:  # the client asks another gateway, or this one again
            try:
                with waiting(most=MOST_WAIT):
                    found = await asyncio.to_thread(known.view, batch)
            except RedisUnavailable:  # the server is asked again
                found = None
            except EXPECTED as error:
                refusal = refusal_of(error)
                yield _event("error", json.dumps(SHARED.error(refusal, SHARED.status(refusal))))
                return
            text = json.dumps(found) if found else last
            if text != last:
                last, told = text, time.monotonic()
                if found and found["status"] in ENDED:
                    yield _event("done", text)
                    return
                yield _event("batch", text)
            elif time.monotonic() - told >= _ALIVE_SECONDS:
                told = time.monotonic()
                yield ": still there\n\n"
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def _known(self) -> Batches:
        if self._gateway.batches is None:
            raise Refusal("not_found", "this gateway keeps no files: it needs the setting gateway_files")
        return self._gateway.batches


def _event(name: str, text: str) -> str:
    return f"event: {name}\ndata: {text}\n\n"


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _asked_page(request: Request, most: int, usual: int | None = None) -> tuple[str | None, int]:
    """What a page begins after, and how many it has; raises `Refusal` for a number that is none."""
    given = request.query_params.get("limit") or str(usual or most)
    if not given.isdecimal() or not 1 <= len(given) <= 9 or not 1 <= int(given) <= most:
        raise Refusal("invalid", f"limit: a number from 1 to {most:,}", param="limit")
    return request.query_params.get("after"), int(given)
