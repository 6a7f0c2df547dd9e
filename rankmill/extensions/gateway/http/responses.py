"""Sends refusals in the form of a dialect, events as they come, and files in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing

import anyio
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rankmill.extensions.gateway.dialects.base import Dialect
from rankmill.extensions.gateway.refusals import Refusal

_QUIET_SECONDS = 15.0
"""After this many seconds without an event, a stream of events sends a comment, so that proxies keep the
connection.
"""

_UNREAD = frozenset({"too_large", "no_key", "media_type", "overloaded", "gone", "slow"})
"""Kinds of refusals that may come before the request's body has been read. After an answer with one of these
refusals, the connection is closed: the client's next bytes might be the rest of the body.
"""


def refused(dialect: Dialect, refusal: Refusal) -> Response:
    """Make the HTTP answer to a refused request, in the form of the dialect's errors."""
    status = dialect.status(refusal)
    headers = {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(max(round(refusal.retry_after), 1))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.kind in _UNREAD:
        headers["Connection"] = "close"
    return JSONResponse(dialect.error(refusal, status), status, headers)


def event(name: str, data: object) -> bytes:
    """Write a server-sent event with this name, and with `data` as JSON."""
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class Stream(StreamingResponse):
    """An HTTP answer that is sent in pieces. The exit stack `ends` holds what the request uses until the
    answer ends. The stack is closed when the answer ends, even after an error.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], ends: AsyncExitStack, headers: Mapping[str, str], media_type: str
    ) -> None:
        self._ends = ends
        super().__init__(pieces, headers=headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._ends:
            await super().__call__(scope, receive, send)


def event_stream(events: AsyncGenerator[bytes], ends: AsyncExitStack) -> Stream:
    """Make an HTTP answer that sends each of the server-sent `events` as soon as it is made. The exit stack
    `ends` holds what the request uses, and is closed when the answer ends.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(_with_comments(events), ends, headers, "text/event-stream")


async def _with_comments(events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events, and a comment after each `_QUIET_SECONDS` without an event. A task of its own makes
    the events.
    """
    send, receive = anyio.create_memory_object_stream[bytes](1)

    async def produce() -> None:
        async with send, aclosing(events):
            async for event in events:
                await send.send(event)

    producing = asyncio.create_task(produce())
    try:
        while True:
            try:
                with anyio.fail_after(_QUIET_SECONDS):
                    piece = await receive.receive()
            except TimeoutError:
                piece = b": waiting\n\n"
            except anyio.EndOfStream:
                break
            yield piece
        await producing
    finally:
        receive.close()
        producing.cancel()
        await asyncio.wait({producing})


def download(
    pieces: Iterator[bytes], ends: AsyncExitStack, headers: Mapping[str, str], media_type: str
) -> Stream:
    """Make an HTTP answer that sends a file in pieces.

    A download counts as a request in progress until `ends` is closed. That happens before the last piece is
    sent, because a client that has the last piece may send its next request.
    """

    async def until_ended() -> AsyncIterator[bytes]:
        last = b""
        async for piece in iterate_in_threadpool(pieces):
            if last:
                yield last
            last = piece
        await ends.aclose()
        yield last

    return Stream(until_ended(), ends, headers, media_type)
