"""Adds the paths of OpenAI's API for files and batches to the gateway, and deletes old files each hour."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from shlex import quote as quote_argument
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from rankmill.extensions.batches.folder import FilesFolder
from rankmill.extensions.batches.records import BatchRecord, FileRecord
from rankmill.extensions.batches.service import Batches, NewBatch, NewFile
from rankmill.extensions.batches.settings import BatchSettings
from rankmill.extensions.batches.views import ENDED, file_view, page
from rankmill.extensions.gateway.bodies import uploaded
from rankmill.extensions.gateway.dialects.base import read_as
from rankmill.extensions.gateway.dialects.shared import SHARED
from rankmill.extensions.gateway.gateway import Addition, Gateway
from rankmill.extensions.gateway.http.dependencies import Caller, TheGateway, from_json, new_router
from rankmill.extensions.gateway.http.document import body, json_body
from rankmill.extensions.gateway.http.responses import download, event, event_stream
from rankmill.extensions.gateway.keys.admission import MOST_WAIT
from rankmill.extensions.gateway.refusals import EXPECTED, Refusal, refusal_of
from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.runtime.settings import Settings

_LOOK_SECONDS = 0.5

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}

logger = logging.getLogger(__name__)
router = new_router("batches", "/v1")


class BatchPaths(Addition):
    """Serves files and batches, if the settings name a folder for them."""

    router = router

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        files = settings.of(BatchSettings).gateway_files
        self._folder = FilesFolder(files) if files else None
        self.keeps_data = self._folder is not None
        self.batches: Batches | None = None

    def attach(self, gateway: Gateway) -> None:
        if self._folder:
            self.batches = Batches(self.settings, gateway.redis_url)

    def advice(self, redis_url: str) -> str | None:
        if self._folder is None:
            return None
        files = quote_argument(str(self._folder.path))
        command = f"rankmill runner --redis {redis_url} --read {files} --write {files}"
        return f"batches wait for a runner: {command}"

    async def work(self) -> None:
        while self.batches:
            try:
                with waiting(most=MOST_WAIT):  # because a stopping process waits for this thread
                    await asyncio.to_thread(self.batches.sweep)
            except (*EXPECTED, OSError) as error:
                logger.warning("expired files are not deleted yet: %s", error)
            await asyncio.sleep(self.batches.sweep_seconds)


async def _batches(gateway: TheGateway, key: Caller) -> Batches:
    batches = gateway.addition(BatchPaths).batches
    if batches is None:
        raise Refusal(
            "not_found", "this gateway keeps no files; its setting gateway_files names a folder for them"
        )
    return batches


TheBatches = Annotated[Batches, Depends(_batches)]
Id = Annotated[str, Path(alias="id")]


@router.post("/files", summary="Upload the file of a batch", openapi_extra=body("multipart/form-data", _FORM))
async def upload(request: Request, gateway: TheGateway, key: Caller, batches: TheBatches) -> dict[str, Any]:
    """Keep an uploaded file."""
    async with gateway.admission.admitted(key), uploaded(request, batches.most_bytes) as (file, expires):
        after = read_as(NewFile, {"expires_after": expires}).expires_after if expires else None
        name, size = file.filename or "", file.size or 0
        return file_view(await asyncio.to_thread(batches.upload, key, name, file.file, size, after))


@router.get("/files", summary="The files, the latest first")
def list_files(
    key: Caller,
    batches: TheBatches,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: str = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    """A page of the caller's files."""
    files = [file for file in batches.all(FileRecord, key) if not purpose or file.purpose == purpose]
    return page(files, file_view, after, limit, oldest_first=order == "asc")


@router.get("/files/{id}", summary="A file")
def find_file(key: Caller, batches: TheBatches, file_id: Id) -> dict[str, Any]:
    """The record of a file."""
    return file_view(batches.find(FileRecord, key, file_id))


@router.delete("/files/{id}", summary="Delete a file")
def delete_file(key: Caller, batches: TheBatches, file_id: Id) -> dict[str, Any]:
    """Delete a file and its record."""
    batches.delete(key, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get(
    "/files/{id}/content", summary="The bytes of a file", response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)  # fmt: skip
async def content(gateway: TheGateway, key: Caller, batches: TheBatches, file_id: Id) -> Response:
    """The bytes of a file."""
    file = await asyncio.to_thread(batches.find, FileRecord, key, file_id)
    headers = {
        "Content-Length": str(file.bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.name)}",
        "X-Content-Type-Options": "nosniff",
    }
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gateway.admission.admitted(key))
        blocks = await asyncio.to_thread(batches.content, file)
        return download(blocks, stack.pop_all(), headers, "application/octet-stream")


@router.post("/batches", summary="Submit a batch", openapi_extra=json_body(NewBatch))
def create_batch(
    gateway: TheGateway, key: Caller, batches: TheBatches, wanted: Annotated[NewBatch, from_json(NewBatch)]
) -> dict[str, Any]:
    """Submit a batch, which a runner then scores."""
    return batches.create(key, wanted, gateway.served.resolve)


@router.get("/batches", summary="The batches, the latest first")
def list_batches(
    key: Caller,
    batches: TheBatches,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """A page of the caller's batches."""
    return page(batches.all(BatchRecord, key), batches.view, after, limit)


@router.get("/batches/{id}", summary="A batch")
def find_batch(key: Caller, batches: TheBatches, batch_id: Id) -> dict[str, Any]:
    """The present state of a batch."""
    return batches.view(batches.find(BatchRecord, key, batch_id))


@router.post("/batches/{id}/cancel", summary="Cancel a batch")
def cancel_batch(key: Caller, batches: TheBatches, batch_id: Id) -> dict[str, Any]:
    """Cancel a batch; its runner stops with the next heartbeat."""
    return batches.cancel(key, batch_id)


@router.get(
    "/batches/{id}/events", summary="A batch's progress, as server-sent events", response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)  # fmt: skip
async def follow_batch(gateway: TheGateway, key: Caller, batches: TheBatches, batch_id: Id) -> Response:
    """Send the batch as an event whenever it changes, until it ends."""
    batch = await asyncio.to_thread(batches.find, BatchRecord, key, batch_id)
    return event_stream(_events(gateway, batches, batch), AsyncExitStack(), most_unread=1)


async def _events(gateway: Gateway, batches: Batches, batch: BatchRecord) -> AsyncGenerator[bytes]:
    """Yield each new state of a batch as an event ``batch``, and its final state as ``done``.

    While Redis does not answer, the state is read again. After any other error, the last event is ``error``.
    """
    last = None
    while not gateway.is_stopping:  # the client will ask another gateway, or this one after its restart
        try:
            with waiting(most=MOST_WAIT):
                view = await asyncio.to_thread(batches.view, batch)
            if view != last and view["status"] in ENDED:
                yield event("done", view)
                return
            if view != last:
                yield event("batch", view)
            last = view
        except RedisUnavailable:  # the next round asks the server again
            pass
        except EXPECTED as error:
            refusal = refusal_of(error, gateway.names)
            yield event("error", SHARED.error(refusal, SHARED.status(refusal)))
            return
        await asyncio.sleep(_LOOK_SECONDS)
