"""What a worker process tells whoever asks over HTTP: its metrics, and whether it is well."""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus

import redis
from prometheus_client import make_wsgi_app

from jobs.runtime.connection import impatient, unreachable
from jobs.runtime.http import answer, paths, serve
from workers import metrics


def serve_health(address: str, client: redis.Redis, obstacle: Callable[[], str | None]) -> str | None:
    """Serve ``/metrics``, ``/healthz`` and ``/readyz`` as long as the process lives.

    Parameters
    ----------
    address
        ``metrics_address``: ``HOST:PORT`` or ``none``.
    client
        Of the worker's server.
    obstacle
        Says what keeps the worker from its work, or ``None``; whether Redis answers is seen to here.

    Returns
    -------
    The metrics' URL, ``None`` if there is none.

    Raises
    ------
    ConfigError
        It is not possible to listen there.
    """
    if address == "none":
        return None

    probe = impatient(client)

    def ready() -> tuple[HTTPStatus, str]:
        reason = obstacle() or unreachable(probe)
        return (HTTPStatus.OK, "ready") if reason is None else (HTTPStatus.SERVICE_UNAVAILABLE, reason)

    app = paths(
        {
            "/metrics": make_wsgi_app(metrics.REGISTRY),
            "/healthz": answer(lambda: (HTTPStatus.OK, "alive")),
            "/readyz": answer(ready),
        }
    )
    host, port = serve(app, "metrics_address", address)
    return f"http://{_reachable(host, client)}:{port}/metrics"


def _reachable(host: str, client: redis.Redis) -> str:
    """A name of this host for others: of a wildcard, the address with which it reaches Redis."""
    if host not in {"0.0.0.0", "::"}:  # noqa: S104
        return f"[{host}]" if ":" in host else host
    known = client.connection_pool.connection_kwargs
    if "host" not in known:
        return socket.gethostname()
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((known["host"], known.get("port", 6379)))
        except OSError:
            return socket.gethostname()
        found = str(probe.getsockname()[0])
        return f"[{found}]" if ":" in found else found
