"""The gateway's web pages: ``/`` has a form to try the gateway, and ``/docs`` describes its paths."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_PAGE = Path(__file__).resolve().parent / "page"

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{style}; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the pages: they load only the gateway's files, and never open in a frame."""

_SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")


def page_router() -> APIRouter:
    """Make the router of the gateway's pages ``/`` and ``/docs``, and of their files."""
    router = APIRouter(include_in_schema=False)
    swagger = files("fastapi_offline") / "static"
    for path, file in (("/", "index.html"), ("/page.js", "page.js"), ("/page.css", "page.css")):
        _add(router, path, (_PAGE / file).read_bytes(), file)
    for path, file in (("/docs", "docs.html"), ("/docs/docs.js", "docs.js")):
        _add(router, path, (_PAGE / file).read_bytes(), file, style=" 'unsafe-inline'")
    for file in _SWAGGER:
        _add(router, f"/docs/{file}", swagger.joinpath(file).read_bytes(), file)
    return router


def _add(router: APIRouter, path: str, body: bytes, file: str, style: str = "") -> None:
    headers = {
        "Content-Security-Policy": _POLICY.format(style=style),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    kind = f"{_TYPES[Path(file).suffix]}; charset=utf-8"

    async def page(request: Request) -> Response:
        # Redirect from ``/docs/`` to ``/docs``: with the slash, the page's relative links would be wrong.
        if path != "/" and request.scope["raw_path"].endswith(b"/"):
            return Response(status_code=307, headers={"Location": f"..{path}"})
        return Response(body, headers=headers, media_type=kind)

    router.add_api_route(path, page, methods=["GET"])
