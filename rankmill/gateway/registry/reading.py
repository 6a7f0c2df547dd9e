"""The body of a request, read from a thread while the event loop receives it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from rankmill.gateway.bodies import Pace, stated_bytes
from rankmill.gateway.refusals import Refusal

T = TypeVar("T")


class UploadedBody:
    """Reads a body as it comes; make it in the event loop of the request.

    Parameters
    ----------
    request
        The request.
    most
        Most bytes of the body.

    Raises
    ------
    Refusal
        It is larger, by its header or when it is read.
    """

    def __init__(self, request: Request, most: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts = request.stream()
        self._most = most
        self._seen = 0
        self._rest = b""
        self._pace = Pace()
        self._check(stated_bytes(request))

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end; called in a thread.

        Raises
        ------
        Refusal
            The body is too large, or it does not come.
        """
        if not self._rest:
            self._rest = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    async def _next(self) -> bytes:
        try:
            async with self._pace.waiting():
                async for part in self._parts:
                    if part:
                        self._seen += len(part)
                        self._check(self._seen)
                        self._pace.came(len(part))
                        return part
        except ClientDisconnect:
            raise Refusal("gone", "the connection was closed before the whole body was there") from None
        return b""

    def _check(self, size: int) -> None:
        if size > self._most:
            raise Refusal("too_large", f"the model is larger than {self._most / 2**30:g} GiB, the most here")


async def apart(work: Callable[..., T], *given: Any) -> T:
    """Call `work` in a thread of its own, for which the end of the process does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="models", daemon=True).start()
    return await asyncio.wrap_future(future)
