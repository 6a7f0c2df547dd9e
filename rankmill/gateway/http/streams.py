"""Answers that are sent piece by piece: events with scores as chunks are done, and files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rankmill.gateway.dialects.base import Body, Dialect
from rankmill.gateway.refusals import EXPECTED, refusal_of
from rankmill.gateway.scoring import Part, Run, Scored

_QUIET_SECONDS = 15.0
"""After so long without an event a comment is sent, so that proxies keep the connection."""


def wants_events(request: Request, body: Body) -> bool:
    """Whether the answer is to be a stream."""
    return body.stream or "text/event-stream" in request.headers.get("accept", "").lower()


class Events(StreamingResponse):
    """Events ``scores`` (from place ``first`` on, with the errors of others), ``result`` and ``error``.

    Parameters
    ----------
    run, body, dialect
        What is scored, and how its result and its errors are worded.
    ends
        Closed at the end of the stream, whatever ends it.
    """

    def __init__(self, run: Run, body: Body, dialect: Dialect, ends: AsyncExitStack) -> None:
        self._run, self._body, self._dialect, self._ends = run, body, dialect, ends
        self.scored: Scored | None = None
        super().__init__(
            self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _events(self) -> AsyncIterator[bytes]:
        values: list[float] = []
        try:
            async with self._ends:
                async for part in _alive(self._run.parts()):
                    if part is None:
                        yield b": waiting\n\n"
                        continue
                    values += part.scores
                    yield _event("scores", _shown(part))
                self.scored = self._run.whole(values)
                yield _event("result", self._body.answer(self.scored))
        except EXPECTED as error:
            refusal = refusal_of(error)
            yield _event("error", self._dialect.error(refusal, self._dialect.status(refusal)))


class Download(StreamingResponse):
    """A file, piece by piece; `ends` is closed before its last piece, or if nobody reads on.

    So a client that has all of it may begin its next request.
    """

    def __init__(
        self, pieces: Iterator[bytes], ends: AsyncExitStack, headers: Mapping[str, str], media_type: str
    ) -> None:
        self._ends = ends
        super().__init__(self._until_ended(pieces), headers=headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._ends:
            await super().__call__(scope, receive, send)

    async def _until_ended(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        last = b""
        async for piece in iterate_in_threadpool(pieces):
            if last:
                yield last
            last = piece
        await self._ends.aclose()
        yield last


async def _alive(parts: AsyncIterator[Part]) -> AsyncIterator[Part | None]:
    """The parts, and ``None`` whenever the next one takes long."""
    step: asyncio.Task[Part] | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(anext(parts))
            done, _ = await asyncio.wait({step}, timeout=_QUIET_SECONDS)
            if not done:
                yield None
                continue
            try:
                part = step.result()
            except StopAsyncIteration:
                return
            step = None
            yield part
    finally:
        if step and not step.done():
            step.cancel()
            await asyncio.wait({step})


def _shown(part: Part) -> dict[str, object]:
    scores = [None if math.isnan(score) else score for score in part.scores]
    here = range(part.first, part.first + len(scores))
    return {
        "first": part.first,
        "scores": scores,
        "errors": {str(row): reason for row, reason in part.errors.items() if row in here},
    }


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n".encode()
