"""The paths of the dialects: a body in, scores out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.gateway.dialects.base import Dialect, Form, Route
from rankmill.gateway.dialects.routes import ROUTES
from rankmill.gateway.gateway import Gateway
from rankmill.gateway.http.bodies import parse, read_as
from rankmill.gateway.refusals import Refusal

T = TypeVar("T")


def score_router(gateway: Gateway) -> APIRouter:
    """The router of all dialects' paths."""
    router = APIRouter()
    for route in ROUTES:
        router.add_api_route(
            route.path,
            _endpoint(gateway, route),
            methods=["POST"],
            summary=route.summary,
            response_model=None,
            openapi_extra={"requestBody": _schema(route.forms)},
            tags=[*{form.dialect.name: None for form in route.forms}],
        )
    return router


def _endpoint(gateway: Gateway, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        form = route.forms[0]
        try:
            key = await gateway.key(request)
            with gateway.bodies.hold() as held:
                found = parse(await held.read(request))
                form = route.form(found)
                body = read_as(form.body, found)
                scored = await _unless_gone(request, gateway.scoring.score(body.asked(), key))
                return JSONResponse(body.answer(scored))
        except Refusal as refusal:
            return refused(form.dialect, refusal)

    return endpoint


def refused(dialect: Dialect, refusal: Refusal) -> Response:
    """The answer for a refusal, in the form of the dialect."""
    status = dialect.status(refusal)
    headers = {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(max(round(refusal.retry_after), 1))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(dialect.error(refusal, status), status, headers)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Do `work`, which is cancelled if the client closes the connection meanwhile."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # after the body, nothing comes but the end
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal("invalid", "the client has closed the connection")
        return await working
    finally:
        for task in (working, gone):
            task.cancel()


def _schema(forms: tuple[Form, ...]) -> dict[str, object]:
    """The OpenAPI description of a body that has one of `forms`."""
    schemas = [json.loads(json.dumps(form.body.model_json_schema())) for form in forms]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {"application/json": {"schema": schema}}}
