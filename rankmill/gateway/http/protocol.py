"""uvicorn's HTTP connections, with limits for what comes before a body: uvicorn itself has none."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_BYTES = 64 << 10
"""Most bytes of a request's first line and headers."""

_SECONDS = 60.0
"""Longest time until they are there; a connection that sends nothing is closed then, too."""


class LimitedHttp(HttpToolsProtocol):
    """A connection that ends when the head of a request is too large or does not come."""

    _head = 0
    _is_head = True
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head = self._head + len(data) if self._is_head else 0
        if self._head > _MOST_BYTES:
            self.send_400_response(f"the headers have more than {_MOST_BYTES >> 10} KiB")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_head = True
        self._wait()

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._wait_no_more()
        if sum(name == b"host" for name, _ in self.headers) > 1:  # a proxy may have looked at the other one
            self.send_400_response("the request has several Host headers")
            raise ValueError("several Host headers")  # ends the parser
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._wait_no_more()
        self._waiting = asyncio.get_running_loop().call_later(_SECONDS, self._close)

    def _wait_no_more(self) -> None:
        if self._waiting:
            self._waiting.cancel()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
