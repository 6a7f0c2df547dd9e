"""Notes facts about each HTTP or gRPC request, for logs, traces and metrics."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Scope

from rankmill.extensions.gateway import metrics
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.system import system

HEADER = "x-request-id"
SCOPE_KEY = "rankmill.observation"

_VALID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

logger = logging.getLogger(__name__)


@dataclass
class Observation:
    """The facts about a request for logs and metrics. Each part of the gateway fills in what it knows.

    ``status`` is the HTTP status of the answer, or the name of its gRPC status.
    """

    id: str
    status: int | str
    route: str = "other"
    dialect: str = ""
    key: str = ""
    began: float = 0.0


def observation(scope: Scope) -> Observation:
    """Return the facts that were noted about the request with this ASGI scope."""
    note: Observation = scope[SCOPE_KEY]
    return note


@contextmanager
def observing(given: str, status: int | str) -> Iterator[Observation]:
    """Within the ``with`` block, note facts about a request; at the end, add them to the metrics.

    Parameters
    ----------
    given
        The id that the client sent. If it is empty or not a valid id, the request gets a new one.
    status
        The status to note if the client disconnects before the answer.
    """
    request_id = given if _VALID.fullmatch(given) else system.unique_id()
    note = Observation(request_id, status, began=time.perf_counter())
    protocol = "http" if isinstance(status, int) else "rpc"
    span = tracing.begin("request", request=note.id)
    try:
        with about(request=note.id), tracing.within(span):
            yield note
    finally:
        span.set_attribute(f"{protocol}.response.status_code", note.status)
        span.end()
        took = time.perf_counter() - note.began
        metrics.requests.labels(note.route, note.dialect, note.key, note.status).inc()
        metrics.seconds.labels(note.route, note.dialect).observe(took)
        logger.debug("%s: %s in %.1f ms", note.route, note.status, 1000 * took)
