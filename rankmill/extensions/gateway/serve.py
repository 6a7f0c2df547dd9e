"""Serves the gateway's application by uvicorn until the process is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.keys.admission import KeysNeeded
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.http import cannot_listen, is_loopback, shown_address

PORT = 9809
"""The port of a ``gateway_address`` that does not name one."""

_MOST_HEAD_BYTES = 64 << 10

_HEAD_SECONDS = 60.0
"""A request's first line and headers must arrive within this many seconds; otherwise the connection is
closed. For a connection's first request, the time begins with the connection.
"""


def keys_needed(hosts: Sequence[str], *, is_open: bool, has_keys: Callable[[], bool]) -> KeysNeeded:
    """Decide when requests to a gateway need API keys.

    - An open gateway (`is_open`) never needs keys.
    - A gateway with an address that other hosts can reach always needs keys.
    - A gateway that only this host can reach needs keys if any keys exist.

    Parameters
    ----------
    hosts
        The addresses on which the gateway listens.
    is_open
        Whether everyone may use the gateway without a key.
    has_keys
        Returns whether any keys exist.

    Raises
    ------
    ConfigError
        Other hosts can reach one of the addresses, there are no keys, and `is_open` is false.
    """
    if is_open:
        return "never"
    exposed = [host for host in hosts if not is_loopback(host)]
    if not exposed:
        return "if there are any"
    if not has_keys():
        raise ConfigError(
            f"gateway_address: other hosts reach {exposed[0]}, and there are no keys: make one with rankmill "
            "keys create, or add --open to serve everybody"
        )
    return "always"


class _LimitedHttp(H11Protocol):
    """uvicorn's HTTP connection, with three changes:

    - It never upgrades to another protocol.
    - It is closed if the first line and headers of a request do not arrive in time.
    - It is closed if a wrong request comes while an answer is being sent.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def handle_events(self) -> None:
        super().handle_events()
        self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        if self.cycle:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # The message of h11's error, which uvicorn is handling now, says more than `msg`.
            super().send_400_response(f"{msg} {sys.exception()}")
        else:
            # Do not answer: the client would read it as the rest of the answer that is being sent.
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        return False

    def _wait_for_head(self) -> None:
        """Start or stop the time limit for the first line and headers of the next request."""
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task:
            self._wait_no_more()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(_HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _wait_no_more(self) -> None:
        if self._waiting:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """uvicorn's server, except that it does not raise a signal again after the signal has stopped it."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, begin: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._begin = begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Do not announce the address before signals are handled: a program that reads it may send a signal at
        # once.
        await self._begin()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.stop()  # the lifespan closes the gateway's parts later, after all requests
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    app: FastAPI,
    at: tuple[str, int],
    on_start: Callable[[str], None],
) -> None:
    """Serve a gateway's application until SIGTERM or SIGINT. Requests in progress then get
    ``gateway_stop_seconds`` to end.

    Parameters
    ----------
    app
        The application, made by `make_app`.
    at
        Host and port to listen on; port 0 means any free port.
    on_start
        Called with each address, including those of extensions, as soon as clients can connect.

    Raises
    ------
    ConfigError
        The process cannot listen at `at`, or an extension cannot listen at an address of its own.
    """
    gateway: Gateway = app.state.gateway
    host, port = at
    try:
        is_v6 = ":" in host
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=2048,
            dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise cannot_listen("gateway_address", shown_address(host, port), error) from None
    config = uvicorn.Config(
        app, http=_LimitedHttp, ws="none", log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=max(round(gateway.own.gateway_stop_seconds), 1), timeout_keep_alive=75,
        h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
    )  # fmt: skip

    async def begin() -> None:
        for addition in gateway.additions:
            if address := await addition.listen():
                on_start(address)
        on_start(f"http://{shown_address(host, listener.getsockname()[1])}")

    _Server(config, gateway, begin).run(sockets=[listener])
