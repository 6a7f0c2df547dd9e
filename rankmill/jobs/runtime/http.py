"""A small HTTP server in its own thread, for the metrics and health of a process.

This server replaces prometheus_client's, which answers every path with metrics, accepts any Host header, and
cannot use another port if one is taken.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.connection import impatient, unreachable
from rankmill.jobs.system import system

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    import redis

MANY_PORTS = 100
"""A process that may run several times on one host tries at most this many successive ports."""

SERVICE_PORTS = frozenset({9807, 9809, 9810})
"""Ports of the exporter and the gateway (HTTP, gRPC). `serve` skips them when it tries successive ports."""

logger = logging.getLogger(__name__)


def serve(
    app: WSGIApplication,
    setting: str,
    address: str,
    names: Collection[str] | None = None,
    *,
    usual: int | None = None,
    ports: int = 1,
) -> tuple[str, int]:
    """Serve a WSGI app over HTTP from a daemon thread.

    Requests whose Host header names another host are refused. Otherwise, a web page could read all answers by
    DNS rebinding.

    Parameters
    ----------
    app
        The WSGI app, which is called in a thread of its own for each request.
    setting
        Name of the setting that has the address, for errors and the log.
    address
        ``HOST:PORT``; port 0 means any free port.
    names
        Names that a Host header may have. It may always have ``localhost``, an IP address or the host of
        `address`. With ``None``, it may have any name, unless `address` is a loopback address, which other
        hosts cannot reach directly.
    usual
        The port of an address that does not name one. Without `usual`, the address must name a port.
    ports
        Number of successive ports that are tried.

    Returns
    -------
    The host and the port of the server.

    Raises
    ------
    ConfigError
        The address is not valid, or the process cannot listen there.
    """
    host, first = split_address(setting, address, usual)
    if names is not None or is_loopback(host):
        others = ", or a host name from the setting exporter_hosts" if names is not None else ""
        app = _known_hosts_only(app, {host, *(names or ())}, f"localhost or an IP address{others}")
    for port in range(first, min(first + ports, 65536)):
        if port != first and port in SERVICE_PORTS:
            continue
        try:
            server = _server(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports == 1:
                raise cannot_listen(setting, address, error) from None
            continue
        if port != first:
            logger.warning("%s: port %d is in use, using %d", setting, first, port)
        server.set_app(_guarded(app))
        system.Thread(target=server.serve_forever, name=setting, daemon=True).start()
        return host, server.server_port
    raise ConfigError(f"{setting}: no port from {first} to {port} is free on {host}")


def cannot_listen(setting: str, address: str, error: OSError) -> ConfigError:
    """Make the error for an address at which this process cannot listen."""
    return ConfigError(f"{setting}: cannot listen on {address}: {error.strerror}; name another address")


def paths(apps: Mapping[str, WSGIApplication]) -> WSGIApplication:
    """Make a WSGI app that passes each request to the app for its path. Other paths get status 404."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return apps.get(environ["PATH_INFO"], missing)(environ, start)

    missing = answer(lambda: (HTTPStatus.NOT_FOUND, f"no such path; use one of {', '.join(apps)}"))
    return app


def answer(
    make: Callable[[], tuple[HTTPStatus, str]], content_type: str = "text/plain; charset=utf-8"
) -> WSGIApplication:
    """Make a WSGI app that answers every request with the status and text that `make` returns."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        status, text = make()
        body = text.encode() + b"\n"
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        start(f"{status.value} {status.phrase}", headers)
        return [body]

    return app


def health(
    client: redis.Redis, obstacle: Callable[[], str | None] = lambda: None
) -> dict[str, WSGIApplication]:
    """Make the WSGI apps for health checks of a process, by their paths ``/healthz`` and ``/readyz``.

    Parameters
    ----------
    client
        A client of the process's Redis server, without which the process is not ready.
    obstacle
        Returns why the process is not ready although Redis serves; ``None`` if there is no such reason.
    """
    probe = impatient(client)

    def readiness() -> tuple[HTTPStatus, str]:
        reason = obstacle() or unreachable(probe)
        return (HTTPStatus.OK, "ready") if reason is None else (HTTPStatus.SERVICE_UNAVAILABLE, reason)

    return {"/healthz": answer(lambda: (HTTPStatus.OK, "alive")), "/readyz": answer(readiness)}


def _known_hosts_only(app: WSGIApplication, names: Collection[str], shown: str) -> WSGIApplication:
    is_known = host_check(names)

    def check(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return (app if is_known(environ.get("HTTP_HOST")) else refusal)(environ, start)

    refusal = answer(lambda: (HTTPStatus.FORBIDDEN, f"use {shown} in the URL"))
    return check


def host_check(names: Collection[str]) -> Callable[[str | None], bool]:
    """Make a function that checks the Host header of a request.

    The function returns true for a missing header, an IP address, ``localhost`` and each of `names`.
    """
    allowed = {"localhost", *(name.lower().rstrip(".") for name in names)}

    def is_known(header: str | None) -> bool:
        if header is None:
            return True
        with suppress(ValueError):  # neither a host nor an IP address
            host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
            return host in allowed or bool(ip_address(host))
        return False

    return is_known


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach the address."""
    with suppress(ValueError):  # not an IP address
        return host == "localhost" or ip_address(host).is_loopback
    return False


def _guarded(app: WSGIApplication) -> WSGIApplication:
    """Make a WSGI app that logs the errors of `app`, and answers HEAD without a body."""

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        try:
            is_head = environ["REQUEST_METHOD"] == "HEAD"
            body = app({**environ, "REQUEST_METHOD": "GET"} if is_head else environ, start)
            # wsgiref would send "Content-Length: 0" for an empty list; an iterator has no known length
            return iter([b""]) if is_head else body
        except Exception:
            logger.exception("the request for %s failed", environ.get("PATH_INFO"))
            return failed(environ, start)

    failed = answer(lambda: (HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; see this process's log"))
    return guarded


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds for a client to send its request

    def log_message(self, *_: Any) -> None:
        """Log nothing, because requests are frequent and uninteresting."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which takes seconds if DNS does not answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback for a client that disconnects or sends nothing."""
        logger.debug("a request from %s broke off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server(host: str, port: int) -> _Server:
    return (_Server6 if ":" in host else _Server)((host, port), _Handler)


def shown_address(host: str, port: int) -> str:
    """Write ``HOST:PORT`` as in URLs: an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(setting: str, address: str, usual: int | None = None) -> tuple[str, int]:
    """Split the address in a setting into host and port. An address without a port gets the port `usual`.

    Raises
    ------
    ConfigError
        The text is not an address, or does not name a port although `usual` is not given.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, usual if parts.port is None else parts.port
        (host or "").encode("idna")
    except ValueError:  # such as a port that is not a number, or a name with two dots in a row
        host, port = None, None
    if host is None or port is None:
        form = "HOST or HOST:PORT" if usual else "HOST:PORT"
        raise ConfigError(
            f"{setting}: {address} is not an address to listen on; give {form}, such as "
            f"127.0.0.1:{usual or 9808}"
        )
    return host, port
