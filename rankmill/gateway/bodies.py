"""Reading the body of a request within limits, before anything is made of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from rankmill.gateway import metrics
from rankmill.gateway.dialects.base import JsonObject
from rankmill.gateway.refusals import Refusal

_READ_SECONDS = 60.0
"""Longest time in which a body is read: a client that sends none takes a request's place."""

_PACE_SECONDS = 60.0
_LEAST_SPEED = 16 << 10
"""An upload has no end in time, but it comes: each so many bytes pay for a second's wait, and `_PACE_SECONDS`
of waiting may be owed."""

_BODIES = 8
"""How many bodies of the largest size may be in memory at a time."""


class Bodies:
    """Reads bodies; knows how many bytes those that are worked on have.

    Parameters
    ----------
    most
        Most bytes of one body.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """What is read within the ``with`` block counts until its end."""
        held = Held(self)
        try:
            yield held
        finally:
            self._held -= held.size
            metrics.held_bytes.set(self._held)

    def take(self, size: int, held: int) -> None:
        """Count `size` bytes more of a body that has `held`; raises `Refusal` if they are too many."""
        if size + held > self._most:
            raise Refusal(
                "too_large", f"the body is larger than {self._most >> 20} MiB, the most that is read"
            )
        if self._held + size > _BODIES * self._most:
            raise Refusal("overloaded", "too many large requests are in progress", retry_after=1)
        self._held += size
        metrics.held_bytes.set(self._held)


class Held:
    """The bodies of one request."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0

    async def read(self, request: Request) -> bytes:
        """The body, read no further than allowed.

        Raises
        ------
        Refusal
            It is too large, not JSON by its type, or does not come.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise Refusal("media_type", "send JSON, with the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal("media_type", "send the body as it is, without a Content-Encoding")
        expected = stated_bytes(request)
        self.count(expected)
        parts, size = [], 0
        try:
            async with asyncio.timeout(_READ_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self.size:
                        self.count(size - self.size)
                    parts.append(part)
        except TimeoutError:
            raise Refusal("slow", f"the body was not there after {_READ_SECONDS:g} s") from None
        except ClientDisconnect:
            raise Refusal("invalid", "the connection was closed before the whole body was there") from None
        return b"".join(parts)

    def count(self, size: int) -> None:
        """Count `size` bytes more; raises `Refusal` if they are too many."""
        self._bodies.take(size, self.size)
        self.size += size


class Pace:
    """Ends an upload that does not come, or comes so slowly that it only keeps others waiting.

    The time in which the gateway works on what has come does not count.
    """

    def __init__(self) -> None:
        self._left = _PACE_SECONDS

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The ``with`` block waits for the next bytes; raises `Refusal` if they come too late."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                yield
        except TimeoutError:
            raise Refusal(
                "slow",
                f"the body does not come: {_PACE_SECONDS:g} s were lost waiting for it, at less than "
                f"{_LEAST_SPEED >> 10} KiB/s",
            ) from None
        self._left -= time.monotonic() - began

    def came(self, size: int) -> None:
        """Note that `size` bytes have come."""
        self._left = min(self._left + size / _LEAST_SPEED, _PACE_SECONDS)


def stated_bytes(request: Request) -> int:
    """How long the body is, by its header; 0 if that says nothing."""
    stated = request.headers.get("content-length", "")
    return int(stated) if stated.isdecimal() and len(stated) < 19 else 0


def parse(raw: bytes) -> JsonObject:
    """The object in a JSON text; depth and numbers are limited by the parser.

    Raises
    ------
    Refusal
        It is not JSON, too deep, or no object.
    """
    try:
        found: Any = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal("invalid", f"the body is not JSON that can be read: {error!s:.200}") from None
    if not isinstance(found, dict):
        raise Refusal("invalid", "the body is not a JSON object")
    return found
