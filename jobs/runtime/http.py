"""A small HTTP server in a thread of its own: for the metrics and the health of a process."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from jobs.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_SUCCESSIVE = 100
"""Ports to try, the first included."""

logger = logging.getLogger(__name__)


def serve(app: WSGIApplication, setting: str, address: str) -> tuple[str, int]:
    """Serve `app` from a daemon thread, on the first free port from that of `address` on.

    Parameters
    ----------
    app
        Called in a thread for each request.
    setting
        Name of the setting, for errors and the log.
    address
        ``HOST:PORT``; port 0 is any free one.

    Returns
    -------
    host and port it listens on.

    Raises
    ------
    ConfigError
        It is not possible to listen there.
    """
    host, first = _split(setting, address)
    for port in range(first, min(first + _SUCCESSIVE, 65536)):
        try:
            server = _server(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"{setting}: cannot listen on {address}: {error.strerror}") from None
            continue
        if port != first:
            logger.warning("%s: port %d is in use, using %d", setting, first, port)
        server.set_app(app)
        threading.Thread(target=server.serve_forever, name=setting, daemon=True).start()
        return host, server.server_port
    raise ConfigError(f"{setting}: no port from {first} to {port} is free on {host}")


def paths(apps: Mapping[str, WSGIApplication]) -> WSGIApplication:
    """The app for each path, and nothing else."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return apps.get(environ["PATH_INFO"], missing)(environ, start)

    missing = answer(lambda: (HTTPStatus.NOT_FOUND, f"there is {', '.join(apps)}"))
    return app


def answer(
    make: Callable[[], tuple[HTTPStatus, str]], content_type: str = "text/plain; charset=utf-8"
) -> WSGIApplication:
    """An app that answers with the status and the text that `make` makes, whatever it was asked."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        status, text = make()
        body = text.encode() + b"\n"
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        start(f"{status.value} {status.phrase}", headers)
        return [body]

    return app


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds for a client to say what it wants

    def log_message(self, *_: Any) -> None:
        """Nothing: scrapes are no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the look-up of the host's name, which takes seconds where DNS does not answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """No traceback over a client that goes away or says nothing."""
        logger.debug("a request from %s broke off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server(host: str, port: int) -> _Server:
    return (_Server6 if ":" in host else _Server)((host, port), _Handler)


def _split(setting: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:  # of a port that is none
        host, port = None, None
    if host is None or port is None:
        raise ConfigError(
            f"{setting}: {address} is no address to listen on; give HOST:PORT, as 127.0.0.1:9808"
        )
    return host, port
