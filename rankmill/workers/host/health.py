"""Serves a worker's metrics, health and readiness over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable

import redis
from prometheus_client import make_wsgi_app

from rankmill.jobs.runtime.http import MANY_PORTS, health, paths, serve
from rankmill.workers.host import metrics


def serve_health(address: str, client: redis.Redis, obstacle: Callable[[], str | None]) -> str | None:
    """Serve ``/metrics``, ``/healthz`` and ``/readyz`` until the process ends.

    Parameters
    ----------
    address
        ``metrics_address``: ``HOST:PORT`` or ``none``.
    client
        A client of the worker's Redis server.
    obstacle
        Returns why the worker cannot score now, or ``None``.

    Returns
    -------
    URL of the metrics; ``None`` if `address` is ``none``.

    Raises
    ------
    ConfigError
        The process cannot listen at `address`.
    """
    if address == "none":
        return None
    apps = {"/metrics": make_wsgi_app(metrics.REGISTRY), **health(client, obstacle=obstacle)}
    host, port = serve(paths(apps), "metrics_address", address, ports=MANY_PORTS)
    return f"http://{_reachable(host, client)}:{port}/metrics"


def _reachable(host: str, client: redis.Redis) -> str:
    """Return `host` as other hosts can reach it: for ``0.0.0.0``, for example, this host's address."""
    if host not in {"0.0.0.0", "::"}:  # noqa: S104
        return f"[{host}]" if ":" in host else host
    server = client.connection_pool.connection_kwargs
    if "host" not in server:
        return socket.gethostname()
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect((server["host"], server.get("port", 6379)))
        except OSError:
            return socket.gethostname()
        own_address = str(probe.getsockname()[0])
        return f"[{own_address}]" if ":" in own_address else own_address
