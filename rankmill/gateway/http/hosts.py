"""Which names of this host a request may use, on an address that only this host reaches.

A web page elsewhere could otherwise read all answers through a browser on this host, by resolving its own
name to a loopback address (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rankmill.jobs.runtime.http import is_address


class KnownHosts:
    """Middleware that answers 403 to requests whose Host is neither an address nor one of `names`.

    Parameters
    ----------
    app, names
        What answers the others; names of this host.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._knows(Headers(scope=scope).get("host")):
            await self._app(scope, receive, send)
            return
        text = "use localhost, an IP address, or a host name from the settings (gateway_hosts) in the URL"
        await JSONResponse({"error": text, "message": text, "detail": text}, 403)(scope, receive, send)

    def _knows(self, asked: str | None) -> bool:
        try:
            host = None if asked is None else (urlsplit(f"//{asked}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return host is None or host in self._names or is_address(host)
