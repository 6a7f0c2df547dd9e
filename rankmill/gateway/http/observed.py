"""Every request is observed: its id comes back in a header, and no traceback goes out."""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankmill.gateway.dialects.routes import dialect_at
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.seen import HEADER, SEEN, observing

_GONE = 499
"""The status that nginx gives a request whose client has gone before there was an answer."""


logger = logging.getLogger(__name__)


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
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                note.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = note.id
            await send(message)

        with observing(Headers(scope=scope).get(HEADER, ""), _GONE) as note:
            scope[SEEN] = note
            if scope["method"] == "HEAD":  # as GET; the server leaves the body away
                scope = {**scope, "method": "GET"}
            try:
                await self._app(scope, receive, answer)
            except asyncio.CancelledError:  # it took longer than gateway_stop_seconds
                refusal = Refusal("unavailable", "the gateway stops: ask again")
                if not begun:
                    await _answer(scope, refusal, 503)(scope, receive, answer)
            except Exception:
                logger.exception("the request for %s failed", scope["path"])
                if begun:
                    raise
                text = f"the request failed; the gateway's log has the reason, with request={note.id}"
                await _answer(scope, Refusal("backend", text), 500)(scope, receive, answer)


def _answer(scope: Scope, refusal: Refusal, status: int) -> JSONResponse:
    return JSONResponse(dialect_at(scope["path"]).error(refusal, status), status)
