"""Serving the application on uvicorn until the process is told to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from jobs.errors import ConfigError
from jobs.runtime.settings import Settings
from rankmill.gateway.keys.admission import KeysNeeded

PORT = 9809
"""The port for an address that names none."""


def listen_at(address: str, port: int | None = None) -> tuple[str, int]:
    """Host and port of `address`; `port` replaces its port.

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
            f"gateway_address: {address} is not an address to listen on; give HOST or HOST:PORT, such as "
            f"127.0.0.1:{PORT}"
        )
    return host, PORT if port is None and found is None else port if port is not None else found or 0


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach the address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def keys_needed(host: str, *, is_open: bool, has_keys: Callable[[], bool]) -> KeysNeeded:
    """Whether requests to this address need keys.

    Raises
    ------
    ConfigError
        Other hosts reach it, and nothing says who of them may use it.
    """
    if is_open:
        return "never"
    if is_loopback(host):
        return "if there are any"
    if not has_keys():
        raise ConfigError(
            f"gateway_address: other hosts reach {host}, and there are no keys: make one with rankmill keys "
            "create, or add --open to serve everybody"
        )
    return "always"


class _Server(uvicorn.Server):
    """Ends well when it is told to: uvicorn's own raises the signal again afterwards."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def serve(app: FastAPI, settings: Settings, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; then requests in progress have `gateway_stop_seconds`.

    Parameters
    ----------
    app, settings
        The application and its settings.
    host, port
        Where to listen; port 0 is any free one.
    on_start
        Called with the URL as soon as connections are taken.

    Raises
    ------
    ConfigError
        The process cannot listen there.
    """
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
        h11_max_incomplete_event_size=64 << 10,
    )
    shown = f"[{host}]" if ":" in host else host
    on_start(f"http://{shown}:{listener.getsockname()[1]}")
    _Server(config).run(sockets=[listener])
