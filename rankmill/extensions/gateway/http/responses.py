"""Makes HTTP answers: refusals, streams of events, and downloads of files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
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
"""Kinds of refusals that may be sent before the whole body was read. The connection is then closed, because
the rest of the body may still arrive.
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
    """An HTTP answer that is sent in pieces. When it ends, it closes `ends`, a stack of open resources.

    If the client has gone, the generator `pieces` is closed before `ends`, and may close the resources with
    an error.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes], ends: AsyncExitStack, headers: Mapping[str, str], media_type: str
    ) -> None:
        self._pieces, self._ends = pieces, ends
        super().__init__(pieces, headers=headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._ends, aclosing(self._pieces):
            await super().__call__(scope, receive, send)


def event_stream(
    events: AsyncGenerator[bytes], ends: AsyncExitStack, *, most_unread: float = math.inf
) -> Stream:
    """Make an HTTP answer that sends server-sent events, each as soon as it is made.

    Parameters
    ----------
    events
        The events as bytes.
    ends
        The request's open resources, which are closed when the answer ends.
    most_unread
        Number of events that are held for a slow client. While so many are held, `events` is not read
        further. By default, there is no limit. With a limit, a client that reads nothing can hold the
        request's resources.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(_with_comments(events, most_unread), ends, headers, "text/event-stream")


async def _with_comments(events: AsyncGenerator[bytes], most_unread: float) -> AsyncGenerator[bytes]:
    """Yield the events, and a comment after each `_QUIET_SECONDS` seconds without an event."""
    send, receive = anyio.create_memory_object_stream[bytes](most_unread)

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
        with anyio.CancelScope(shield=True):  # wait even if the client has gone
            await asyncio.wait({producing})


def download(
    pieces: Iterator[bytes], ends: AsyncExitStack, headers: Mapping[str, str], media_type: str
) -> Stream:
    """Make an HTTP answer that sends a file in pieces.

    Parameters
    ----------
    pieces
        The bytes of the file.
    ends
        The request's open resources. While they are open, the request counts as in progress. They are closed
        just before the last piece is sent, because a client that has the whole file may send its next
        request.
    headers, media_type
        The answer's HTTP headers, and the type of the file.
    """

    async def until_ended() -> AsyncGenerator[bytes]:
        last = b""
        async for piece in iterate_in_threadpool(pieces):
            if last:
                yield last
            last = piece
        await ends.aclose()
        yield last

    return Stream(until_ended(), ends, headers, media_type)
