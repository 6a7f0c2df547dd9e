"""A small HTTP server in a thread of its own: for the metrics and the health of a process."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
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


def serve(
    app: WSGIApplication, setting: str, address: str, names: Collection[str] | None = None
) -> tuple[str, int]:
    """Serve `app` from a daemon thread, on the first free port from that of `address` on.

    What a request asks for by the name of another host is refused, or a web page could have a
    browser on this network read all of it, by letting its own name mean this address.

    Parameters
    ----------
    app
        Called in a thread for each request.
    setting
        Name of the setting, for errors and the log.
    address
        ``HOST:PORT``; port 0 is any free one.
    names
        Of this host, beside ``localhost``, all IP addresses and that of `address`; ``None``: any
        name will do unless `address` is a loopback one, as others can ask there anyway.

    Returns
    -------
    host and port it listens on.

    Raises
    ------
    ConfigError
        It is not possible to listen there.
    """
    host, first = _split(setting, address)
    if names is not None or _is_loopback(host):
        app = _known_hosts_only(app, {"localhost", host, *(names or ())})
    for port in range(first, min(first + _SUCCESSIVE, 65536)):
        try:
            server = _server(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"{setting}: cannot listen on {address}: {error.strerror}") from None
            continue
        if port != first:
            logger.warning("%s: port %d is in use, using %d", setting, first, port)
        server.set_app(_whatever_happens(app))
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


def _known_hosts_only(app: WSGIApplication, names: Collection[str]) -> WSGIApplication:
    """The app for requests whose Host is an IP address or one of `names`."""
    known = {name.lower().rstrip(".") for name in names}

    def check(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        asked = environ.get("HTTP_HOST")
        if asked is None or _host(asked) in known or _is_address(_host(asked)):
            return app(environ, start)
        return refusal(environ, start)

    reason = "ask by localhost, by an IP address, or by a name that the settings give this host"
    refusal = answer(lambda: (HTTPStatus.FORBIDDEN, reason))
    return check


def _host(header: str) -> str:
    """The host of a Host header, without its port; empty for what is none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _whatever_happens(app: WSGIApplication) -> WSGIApplication:
    """The app; an error in it is logged, and answered without its traceback."""

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            return app(environ, start)
        except Exception:
            logger.exception("%s cannot be answered", environ.get("PATH_INFO"))
            return failed(environ, start)

    failed = answer(lambda: (HTTPStatus.INTERNAL_SERVER_ERROR, "this cannot be answered; the log says why"))
    return guarded


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
