"""Serving the application on uvicorn until the process is told to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from rankmill.gateway.gateway import Gateway
from rankmill.gateway.http.protocol import LimitedHttp
from rankmill.gateway.keys.admission import KeysNeeded
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.settings import Settings

PORT = 9809
GRPC_PORT = 9810
"""The ports for an address that names none."""


def listen_at(
    address: str, port: int | None = None, *, setting: str = "gateway_address", usual: int = PORT
) -> tuple[str, int]:
    """Host and port of `address`, which `setting` has; `port` replaces its port, `usual` is that without one.

    Raises
    ------
    ConfigError
        It is no address.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, found = parts.hostname, parts.port
    except ValueError:
        host, found = None, None
    if not host:
        raise ConfigError(
            f"{setting}: {address} is not an address to listen on; give HOST or HOST:PORT, such as "
            f"127.0.0.1:{usual}"
        )
    return host, usual if port is None and found is None else port if port is not None else found or 0


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach the address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def keys_needed(hosts: Sequence[str], *, is_open: bool, has_keys: Callable[[], bool]) -> KeysNeeded:
    """Whether requests to these addresses need keys.

    Raises
    ------
    ConfigError
        Other hosts reach one, and nothing says who of them may use it.
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


class _Server(uvicorn.Server):
    """Serves gRPC beside HTTP, and ends well when it is told to: uvicorn's own raises the signal again."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, begin: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._begin = begin

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._begin()  # signals are handled already, so that whoever learns the address may send one
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.stop()  # its parts are closed at the end of all requests
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def serve(
    app: FastAPI,
    settings: Settings,
    at: tuple[str, int],
    grpc_at: tuple[str, int] | None,
    on_start: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; then requests in progress have `gateway_stop_seconds`.

    Parameters
    ----------
    app, settings
        The application and its settings.
    at, grpc_at
        Hosts and ports to listen on, for HTTP and for gRPC if it is wanted; port 0 is any free one.
    on_start
        Called with each address as soon as connections are taken.

    Raises
    ------
    ConfigError
        The process cannot listen there.
    """
    host, port = at
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048, reuse_port=False)
    except OSError as error:
        raise ConfigError(f"gateway_address: cannot listen on {host}:{port}: {error.strerror}") from None
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(round(settings.gateway_stop_seconds), 1),
        timeout_keep_alive=75,
        http=LimitedHttp,
    )
    gateway: Gateway = app.state.gateway

    async def begin() -> None:
        if grpc_at:
            from rankmill.gateway.grpc.server import GrpcServer  # its packages are needed for gRPC only

            gateway.grpc = calls = GrpcServer(gateway)
            on_start(f"{_shown(grpc_at[0])}:{await calls.start(*grpc_at)} (gRPC)")
        on_start(f"http://{_shown(host)}:{listener.getsockname()[1]}")

    _Server(config, gateway, begin).run(sockets=[listener])


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
