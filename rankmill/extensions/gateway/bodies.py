"""Reads the bodies of requests (JSON, forms or streams), with limits on their size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.dialects.base import JsonObject
from rankmill.extensions.gateway.refusals import Refusal, overloaded, wrong
from rankmill.jobs.contract.errors import OutputError
from rankmill.jobs.system import system

READ_SECONDS = 60.0
"""A JSON body, or the only message of a gRPC call, must arrive within this number of seconds. Without this
limit, silent clients could occupy all ``gateway_requests`` places for requests in progress. A gRPC stream may
stay silent.
"""

_PACE_SECONDS = 60.0
_LEAST_SPEED = 16 << 10
"""Least speed of an upload in bytes per second. An upload that falls `_PACE_SECONDS` seconds behind this
speed is refused.
"""

_BODIES = 8
"""Limit on the bytes of all request bodies in memory together, as a multiple of the largest allowed body."""

_FORM_BYTES = 1 << 20
"""The form of an upload may have at most this many bytes more than the largest allowed file."""


class BodyMemory:
    """Limits the bytes of all request bodies that are in memory at the same time.

    Parameters
    ----------
    most
        The number of bytes that one body may have.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    @contextmanager
    def body(self) -> Iterator[RequestBody]:
        """Yield a reader for the body of one request. Its bytes are counted until the block ends."""
        body = RequestBody(self)
        try:
            yield body
        finally:
            body.count(-body.size)


class RequestBody:
    """Reads the body of one request into memory, and counts its bytes."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    async def read(self, request: Request) -> bytes:
        """Read the whole body of a request.

        Raises
        ------
        Refusal
            The request's headers do not announce plain JSON. The body is too large. The body does not arrive
            completely and in time. Or the bodies of all requests in memory are too large together.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise Refusal("media_type", "send JSON, with the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal("media_type", "send the body as it is, without a Content-Encoding")
        self._check(_stated_bytes(request))
        parts = []
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for part in request.stream():
                    # count bytes only as they arrive: bytes that the header announces take no memory yet
                    self._check(self.size + len(part))
                    self.count(len(part))
                    parts.append(part)
        except TimeoutError:
            raise Refusal(
                "slow", f"the body did not arrive within {READ_SECONDS:g} s; send it again"
            ) from None
        except ClientDisconnect:
            raise Refusal("gone", "the connection was closed before the whole body was there") from None
        return b"".join(parts)

    def count(self, size: int) -> None:
        if self._memory.taken + size > _BODIES * self._memory.most:
            raise overloaded("too many large requests are in progress")
        self.size += size
        self._memory.taken += size
        metrics.body_bytes.set(self._memory.taken)

    def _check(self, size: int) -> None:
        most = self._memory.most
        if size > most:
            raise Refusal("too_large", f"the body is larger than {most >> 20} MiB; send it in parts")


def parse(raw: bytes) -> JsonObject:
    """Return the JSON object in a request's body. Raises `Refusal` if the body is not a JSON object.

    A number that is too large for a float becomes infinite. Fields that are sent back must refuse infinite
    numbers.
    """
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal("invalid", f"the body is not JSON that can be read: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise Refusal("invalid", "the body is not a JSON object")
    return value


class UploadedBody:
    """Reads an upload piece by piece, without keeping it in memory. Make it in the request's event loop.

    An upload that stops or arrives too slowly is refused. Only the time that the gateway waits for bytes
    counts, not the time that the gateway takes between two reads.

    Parameters
    ----------
    request
        The request.
    most
        The number of bytes that the body may have.
    too_large
        The message for a larger body.

    Raises
    ------
    Refusal
        The header ``Content-Length`` says more than `most` bytes.
    """

    def __init__(self, request: Request, most: int, too_large: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = request.receive
        self._most, self._too_large = most, too_large
        self._size = 0
        self._rest = b""
        self._seconds_left = _PACE_SECONDS
        self._is_whole = False
        self._check(_stated_bytes(request))

    async def receive(self) -> Message:
        """Receive the next ASGI message of the upload's request. Raises `Refusal` if the body is too large or
        arrives too slowly.
        """
        began = system.monotonic()
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(
                "slow",
                f"the body arrives too slowly: {_PACE_SECONDS:g} s were lost waiting for it, at less than "
                f"{_LEAST_SPEED >> 10} KiB/s; send it over a faster connection",
            ) from None
        self._seconds_left -= system.monotonic() - began
        size = len(message.get("body", b""))
        self._seconds_left = min(self._seconds_left + size / _LEAST_SPEED, _PACE_SECONDS)
        self._size += size
        self._check(self._size)
        return message

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; returns no bytes at the end. Call `read` in a thread, not in the
        event loop.

        Raises
        ------
        Refusal
            The body is too large or arrives too slowly, or the client has closed the connection.
        """
        while not self._rest and not self._is_whole:
            message = asyncio.run_coroutine_threadsafe(self.receive(), self._loop).result()
            if message["type"] == "http.disconnect":
                raise Refusal("gone", "the connection was closed before the whole body was there")
            self._rest, self._is_whole = message.get("body", b""), not message.get("more_body", False)
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def _check(self, size: int) -> None:
        if size > self._most:
            raise Refusal("too_large", self._too_large)


@asynccontextmanager
async def uploaded(request: Request, most: int) -> AsyncIterator[tuple[UploadFile, dict[str, str]]]:
    """Read the form of an upload, and yield its file and its fields ``expires_after[...]``.

    The field ``expires_after[seconds]=60`` becomes the entry ``{"seconds": "60"}``. A file of more than 1 MiB
    is kept on disk, not in memory.

    Raises
    ------
    Refusal
        The file has more than `most` bytes. The file does not arrive completely and in time. Or the body is
        not a form with a file for a batch.
    OutputError
        The file cannot be written, for instance on a full disk.
    """
    too_large = f"the file is larger than {most >> 20} MiB; send it in parts"
    upload = UploadedBody(request, most + _FORM_BYTES, too_large)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refusal("media_type", "send a form, with Content-Type: multipart/form-data")
    try:
        async with Request(request.scope, upload.receive).form(max_files=1, max_fields=10) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not file.filename:
                raise wrong("file", "a file with a name is missing")
            if purpose != "batch":
                raise wrong("purpose", "must be batch")
            if (file.size or 0) > most:
                raise Refusal("too_large", too_large)
            names = [name for name in form if name.partition("[")[0] == "expires_after"]
            yield file, {name.partition("[")[2].removesuffix("]"): str(form[name]) for name in names}
    except HTTPException as error:
        raise Refusal("invalid", f"the form cannot be read: {error.detail}") from None
    except ClientDisconnect:
        raise Refusal("gone", "the connection was closed before the whole file was there") from None
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"an upload cannot be written to the folder of temporary files: {why}") from None


def _stated_bytes(request: Request) -> int:
    """Return the body's size that a request's ``Content-Length`` states, or 0 without a valid header."""
    stated = request.headers.get("content-length", "")
    return int(stated) if stated.isdecimal() and len(stated) < 19 else 0
