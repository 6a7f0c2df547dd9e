"""Answers that are sent piece by piece: events whenever they come, and whatever becomes of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import Mock

import pytest
from starlette.types import Message

from rankmill.extensions.gateway.http import responses, score_routes
from rankmill.extensions.gateway.http.responses import event, event_stream
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.scoring import SubmittedRequest
from rankmill.producer.client.async_client import AsyncScoringRun


async def sent(
    events: AsyncGenerator[bytes], ends: AsyncExitStack, *, is_gone: bool = False, pause: float = 0
) -> list[bytes]:
    """What a client gets of a stream of events; one that is gone reads nothing, others pause before each."""
    parts: list[bytes] = []

    async def receive() -> Message:
        if not is_gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.sleep(pause)
        parts.append(message.get("body", b""))

    await event_stream(events, ends)({"type": "http", "method": "GET", "headers": []}, receive, send)
    return [part for part in parts if part]


def test_while_no_event_comes_a_comment_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_QUIET_SECONDS", 0.01)

    async def events() -> AsyncGenerator[bytes]:
        yield event("scores", {"first": 0})
        await asyncio.sleep(0.1)
        yield event("result", "über")

    first, *comments, last = asyncio.run(sent(events(), AsyncExitStack()))
    assert first == b'event: scores\ndata: {"first": 0}\n\n'
    assert last == 'event: result\ndata: "über"\n\n'.encode()
    assert set(comments) == {b": waiting\n\n"}


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_a_stream_needs_ends_with_it(is_gone: bool) -> None:
    ended: list[str] = []

    async def events(ends: AsyncExitStack) -> AsyncGenerator[bytes]:
        async with ends:
            yield event("scores", 1)
            if is_gone:
                await asyncio.Event().wait()

    async def begin() -> None:
        ends = AsyncExitStack()
        ends.callback(ended.append, "run")
        await sent(events(ends), ends, is_gone=is_gone)

    asyncio.run(begin())
    assert ended == ["run"]


def test_scores_that_stop_coming_end_the_stream_in_time() -> None:
    class Stuck:
        """A run whose second chunk does not come."""

        stats = SimpleNamespace(rows=1)
        errors: ClassVar[dict[int, str]] = {}

        async def __aiter__(self) -> AsyncIterator[float]:
            yield 0.5
            await asyncio.Event().wait()

    async def events() -> AsyncGenerator[bytes]:
        run: Any = Stuck()
        request = SubmittedRequest(cast("AsyncScoringRun", run), "request", 0.1, None, 0.0)
        try:
            async for chunk in request.chunks():
                yield event("scores", chunk["scores"])
        except Refusal as refusal:
            yield event(refusal.kind, refusal.message)

    first, last = asyncio.run(asyncio.wait_for(sent(events(), AsyncExitStack()), 60))
    assert first == b"event: scores\ndata: [0.5]\n\n"
    assert last.startswith(b'event: timeout\ndata: "1 texts were scored after 0.1 s, the most of a request; ')


def test_a_client_that_reads_slowly_gets_all_scores_that_came_in_time() -> None:
    class Quick:
        """A run whose chunks are there at once."""

        stats = SimpleNamespace(rows=0)
        errors: ClassVar[dict[int, str]] = {}

        async def __aiter__(self) -> AsyncIterator[float]:
            for rows in range(1, 7):
                self.stats.rows = rows
                yield 0.5

    async def events() -> AsyncGenerator[bytes]:
        run: Any = Quick()
        request = SubmittedRequest(cast("AsyncScoringRun", run), "request", 0.1, None, 0.0)
        async for chunk in request.chunks():
            yield event("scores", chunk["first"])
        yield event("result", "all")

    *scores, last = asyncio.run(sent(events(), AsyncExitStack(), pause=0.05))
    assert scores == [event("scores", first) for first in range(6)]
    assert last == event("result", "all")


def test_a_streamed_request_has_ended_when_its_result_is_sent() -> None:
    """A client with one request at once may then send its next request."""
    seen: list[str] = []

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        yield {"first": 0, "scores": [0.5], "errors": {}}

    async def read() -> None:
        ends = AsyncExitStack()
        ends.callback(seen.append, "ended")
        parts: Any = {
            "gateway": Mock(), "note": Mock(), "run": Mock(chunks=chunks), "body": Mock(), "ends": ends
        }  # fmt: skip
        parts["body"].answer.return_value = "all"
        async for piece in score_routes._events(**parts):
            seen.append(piece.decode().partition("\n")[0])

    asyncio.run(read())
    assert seen == ["event: scores", "ended", "event: result"]


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_a_client_that_goes_away_has_begun_is_cancelled(is_slow: bool) -> None:
    """Also if the client has not read what it was sent."""
    seen: list[str] = []

    @asynccontextmanager
    async def run() -> AsyncIterator[None]:
        try:
            yield
            seen.append("complete")
        except BaseException:
            await asyncio.sleep(0)  # as a command to Redis
            seen.append("cancelled")
            raise

    async def events(ends: AsyncExitStack) -> AsyncGenerator[bytes]:
        async with ends:
            for number in range(9):
                yield event("scores", number)
            await asyncio.Event().wait()

    async def begin() -> None:
        ends, is_gone = AsyncExitStack(), asyncio.Event()
        await ends.enter_async_context(run())

        async def receive() -> Message:
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            body = message.get("body", b"")
            if b"0" in body if is_slow else b"8" in body:
                is_gone.set()
                await asyncio.Event().wait()

        await event_stream(events(ends), ends)(
            {"type": "http", "method": "GET", "headers": []}, receive, send
        )
        seen.append("answered")

    asyncio.run(begin())
    assert seen == ["cancelled", "answered"]


def test_a_client_that_reads_nothing_does_not_hold_the_request() -> None:
    async def events(ends: AsyncExitStack) -> AsyncGenerator[bytes]:
        async with ends:
            for number in range(9):
                yield event("scores", number)

    async def begin() -> None:
        ends, has_ended = AsyncExitStack(), asyncio.Event()
        ends.callback(has_ended.set)

        async def receive() -> Message:
            await has_ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if "body" in message:
                await asyncio.Event().wait()

        scope = {"type": "http", "method": "GET", "headers": []}
        await asyncio.wait_for(event_stream(events(ends), ends)(scope, receive, send), 60)

    asyncio.run(begin())
