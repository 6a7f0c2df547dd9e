"""Cuts a stream of messages into batches: what is there already is scored together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeVar

from google.protobuf.message import Message

from rankmill.gateway.refusals import Refusal

_ROWS = 256
_WAIT_SECONDS = 0.002
"""How long a batch waits for one message more."""

M = TypeVar("M", bound=Message)


async def batches(stream: AsyncIterable[M], most_bytes: int) -> AsyncIterator[list[M]]:
    """Batches of up to 256 messages and `most_bytes`, in order; none waits for messages that do not come."""
    messages = aiter(stream)
    coming = asyncio.ensure_future(anext(messages, None))
    try:
        while (first := await coming) is not None:
            batch, size = [first], first.ByteSize()
            coming = asyncio.ensure_future(anext(messages, None))
            while len(batch) < _ROWS and size < most_bytes:
                await asyncio.wait({coming}, timeout=_WAIT_SECONDS)
                if not coming.done() or (message := coming.result()) is None:
                    break
                batch.append(message)
                size += message.ByteSize()
                coming = asyncio.ensure_future(anext(messages, None))
            yield batch
    finally:
        coming.cancel()


async def gather(stream: AsyncIterable[M], most: int, most_bytes: int) -> list[M]:
    """All messages of a stream.

    Raises
    ------
    Refusal
        They are more than `most`, or have more than `most_bytes`.
    """
    found: list[M] = []
    size = 0
    async for message in stream:
        found.append(message)
        size += message.ByteSize()
        if len(found) > most:
            raise Refusal("too_large", f"the stream has more than {most:,} texts, the most of one request")
        if size > most_bytes:
            raise Refusal(
                "too_large", f"the stream is larger than {most_bytes >> 20} MiB, the most that is read"
            )
    return found
