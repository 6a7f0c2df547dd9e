"""A runner's HTTP endpoints: health and readiness."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import redis

from rankmill.jobs.runtime.connection import impatient, unreachable
from rankmill.jobs.runtime.http import answer, paths, serve


def serve_health(address: str, client: redis.Redis, is_alive: Callable[[], bool]) -> None:
    """Serve ``/healthz`` and ``/readyz`` until the process ends.

    Parameters
    ----------
    address
        ``metrics_address``: ``HOST:PORT`` or ``none``.
    client
        A client of the runner's Redis server.
    is_alive
        Whether the runner can go on.

    Raises
    ------
    ConfigError
        The process cannot listen at `address`.
    """
    if address == "none":
        return
    probe = impatient(client)

    def alive() -> tuple[HTTPStatus, str]:
        if is_alive():
            return HTTPStatus.OK, "alive"
        return HTTPStatus.SERVICE_UNAVAILABLE, "the heartbeat has ended"

    def ready() -> tuple[HTTPStatus, str]:
        reason = unreachable(probe)
        return (HTTPStatus.OK, "ready") if reason is None else (HTTPStatus.SERVICE_UNAVAILABLE, reason)

    serve(paths({"/healthz": answer(alive), "/readyz": answer(ready)}), "metrics_address", address)
