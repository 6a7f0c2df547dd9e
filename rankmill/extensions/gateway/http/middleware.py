"""Middleware that observes every HTTP request, and middleware that refuses unknown Host headers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankmill.extensions.gateway.dialects.routes import dialect_at
from rankmill.extensions.gateway.observation import HEADER, SCOPE_KEY, observing
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.jobs.runtime.http import host_check

_GONE = 499
"""The HTTP status in logs and metrics for a request whose client has gone before the answer, as in nginx."""

_BEFORE_PATH = re.compile(r"^https?://[^/]*")
"""Matches ``http://host`` before the path of a request. Clients of a proxy send whole URLs, which every HTTP
server must accept.
"""

logger = logging.getLogger(__name__)


class Observed:
    """The outermost middleware. It observes each request, returns the request's id in a header, and never
    answers with a traceback.

    Parameters
    ----------
    app
        The application that answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _BEFORE_PATH.sub("", scope["path"])
        # The path gets exactly one slash at its beginning, and none at its end.
        scope = {**scope, "path": "/" + path.strip("/")}
        begun = False
        headers = Headers(scope=scope)
        has_held_body = headers.get("expect", "").lower() == "100-continue"

        async def read() -> Message:
            nonlocal has_held_body
            has_held_body = False  # the client may send the body now, because uvicorn answers 100 Continue
            return await receive()

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                note.status = message["status"]
                written = MutableHeaders(scope=message)
                written[HEADER] = note.id
                # If the body was never read, the client's next bytes may be this body, or another request.
                if has_held_body:
                    written["Connection"] = "close"
            await send(message)

        async def fail(refusal: Refusal, status: int, headers: Mapping[str, str] | None = None) -> None:
            problem = dialect_at(scope["path"]).error(refusal, status)
            await JSONResponse(problem, status, headers)(scope, receive, answer)

        with observing(headers.get(HEADER, ""), _GONE) as note:
            scope[SCOPE_KEY] = note
            if "content-length" in headers and "transfer-encoding" in headers:
                text = "the body has two lengths: send Content-Length or Transfer-Encoding, not both"
                await fail(Refusal("invalid", text), 400, {"Connection": "close"})
                return
            if scope["method"] == "HEAD":  # HEAD is answered like GET, and uvicorn leaves the body out
                scope = {**scope, "method": "GET"}
            try:
                await self._app(scope, read, answer)
            except asyncio.CancelledError:  # uvicorn cancels after gateway_stop_seconds
                if not begun:
                    await fail(Refusal("unavailable", "the gateway stops: ask again"), 503)
            except Exception:
                logger.exception("the request for %s failed", scope["path"])
                if begun:
                    raise
                text = f"the request failed; the gateway's log has the reason, with request={note.id}"
                await fail(Refusal("backend", text), 500)


class KnownHosts:
    """Middleware that answers 403 to requests with a Host that is neither an IP address, nor ``localhost``,
    nor in `names`.

    Without this check, any web site could read the answers through a browser on this host, by letting its own
    name stand for a loopback address (DNS rebinding).

    Parameters
    ----------
    app, names
        The application that answers other requests, and the names of this host.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._is_known = app, host_check(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_known(Headers(scope=scope).get("host")):
            await self._app(scope, receive, send)
            return
        text = "use localhost, an IP address, or a host name from the settings (gateway_hosts) in the URL"
        await JSONResponse({"error": text, "message": text, "detail": text}, 403)(scope, receive, send)
