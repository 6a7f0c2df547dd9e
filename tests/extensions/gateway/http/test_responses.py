"""Answers that are sent piece by piece: events whenever they come, and whatever becomes of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from starlette.types import Message

from rankmill.extensions.gateway.http import responses
from rankmill.extensions.gateway.http.responses import event, event_stream
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.scoring import SubmittedRequest
from rankmill.producer.client.async_client import AsyncScoringRun


async def sent(events: AsyncGenerator[bytes], ends: AsyncExitStack, *, is_gone: bool = False) -> list[bytes]:
    """What a client gets of a stream of events; one that is gone reads nothing."""
    parts: list[bytes] = []

    async def receive() -> Message:
        if not is_gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
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
        request = SubmittedRequest(cast("AsyncScoringRun", run), "request", 0.1)
        try:
            async for chunk in request.chunks():
                yield event("scores", chunk.scores)
        except Refusal as refusal:
            yield event(refusal.kind, refusal.message)

    first, last = asyncio.run(asyncio.wait_for(sent(events(), AsyncExitStack()), 60))
    assert first == b"event: scores\ndata: [0.5]\n\n"
    assert last.startswith(b'event: timeout\ndata: "1 texts were scored after 0.1 s, the most of a request; ')
