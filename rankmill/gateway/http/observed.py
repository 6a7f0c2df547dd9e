"""What is seen of every request: its id in logs, traces and headers, its metrics, and no traceback."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.runtime import tracing
from jobs.runtime.logs import about
from rankmill.gateway import metrics

HEADER = "x-request-id"

_VALID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

_SEEN = "rankmill.seen"

logger = logging.getLogger(__name__)


@dataclass
class Seen:
    """What is known of a request, for metrics: each part writes what it learns."""

    id: str
    route: str = "other"
    dialect: str = ""
    key: str = ""
    status: int = 499  # nginx': the client has gone before there was an answer
    began: float = 0.0


def seen(scope: Scope) -> Seen:
    """What is known of the request with this scope."""
    found: Seen = scope[_SEEN]
    return found


class Observed:
    """Middleware around everything else.

    Parameters
    ----------
    app
        What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        note = Seen(given if _VALID.fullmatch(given) else uuid.uuid4().hex, began=time.perf_counter())
        scope[_SEEN] = note
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                note.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = note.id
            await send(message)

        span = tracing.begin("request", request=note.id)
        try:
            with about(request=note.id), tracing.within(span):
                try:
                    await self._app(scope, receive, answer)
                except asyncio.CancelledError:  # it took longer than gateway_stop_seconds
                    text = "the gateway stops: ask again"
                    if not begun:
                        await JSONResponse({"error": text, "message": text}, 503)(scope, receive, answer)
                except Exception:
                    logger.exception("the request for %s failed", scope["path"])
                    if begun:
                        raise
                    text = f"the request failed; the gateway's log has the reason, with request={note.id}"
                    await JSONResponse({"error": text, "message": text}, 500)(scope, receive, answer)
        finally:
            span.set_attribute("http.response.status_code", note.status)
            span.end()
            self._count(scope, note)

    def _count(self, scope: Scope, note: Seen) -> None:
        took = time.perf_counter() - note.began
        metrics.requests.labels(note.route, note.dialect, note.key, note.status).inc()
        metrics.seconds.labels(note.route, note.dialect).observe(took)
        logger.debug("%s %s: %d in %.1f ms", scope["method"], note.route, note.status, 1000 * took)
