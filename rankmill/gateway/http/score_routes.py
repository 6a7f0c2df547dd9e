"""The paths of the dialects: a body in, scores out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.gateway import metrics
from rankmill.gateway.bodies import parse
from rankmill.gateway.dialects.base import Dialect, Form, Route, read_as
from rankmill.gateway.dialects.routes import ROUTES
from rankmill.gateway.http.streams import Events, wants_events
from rankmill.gateway.refusals import EXPECTED, Refusal, refusal_of
from rankmill.gateway.seen import Seen, seen

if TYPE_CHECKING:
    from rankmill.gateway.gateway import Gateway
    from rankmill.gateway.scoring import Scored

T = TypeVar("T")


def score_router(gateway: Gateway) -> APIRouter:
    """The router of all dialects' paths."""
    router = APIRouter()
    for route in ROUTES:
        router.add_api_route(
            route.path,
            _Endpoint(gateway, route).answer,
            methods=["POST"],
            summary=route.summary,
            operation_id="post" + route.path.replace("/", "_"),
            response_model=None,
            responses=_ANSWERS | REFUSED,
            response_class=Response,
            openapi_extra={"requestBody": _schema(route.forms)},
            tags=[*dict.fromkeys(form.dialect.name for form in route.forms)],
        )
    return router


class _Endpoint:
    """What happens at one path."""

    def __init__(self, gateway: Gateway, route: Route) -> None:
        self._gateway, self._route = gateway, route

    async def answer(self, request: Request) -> Response:
        """The answer to a request, in the dialect of its body."""
        note = seen(request.scope)
        note.route, note.dialect = self._route.path, self._route.dialect.name
        form: Form | None = None
        async with AsyncExitStack() as stack:
            try:
                key = await stack.enter_async_context(self._gateway.admitted(note, request.headers))
                held = stack.enter_context(self._gateway.bodies.hold())
                found = parse(await held.read(request))
                form = self._route.form(found)
                note.dialect = form.dialect.name
                body = read_as(form.body, found)
                asked = body.asked()
                began = time.perf_counter()
                metrics.stages.labels("admission").observe(began - note.began)
                scoring = self._gateway.scoring
                if wants_events(request, body):
                    run = await stack.enter_async_context(scoring.begin(asked, key))
                    ends = AsyncExitStack()
                    events = Events(run, body, form.dialect, ends)
                    ends.push_async_exit(stack.pop_all())
                    ends.callback(self._count, note, events)
                    return events
                scored = await _unless_gone(request, scoring.score(asked, key))
                self._gateway.count(note, scored)
                return JSONResponse(body.answer(scored), headers=_timing(scored))
            except EXPECTED as error:
                return refused(form.dialect if form else self._route.dialect, refusal_of(error))

    def _count(self, note: Seen, events: Events) -> None:
        if events.scored:
            self._gateway.count(note, events.scored)


def refused(dialect: Dialect, refusal: Refusal) -> Response:
    """The answer for a refusal, in the form of the dialect."""
    status = dialect.status(refusal)
    headers = {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(max(round(refusal.retry_after), 1))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.kind in {"too_large", "no_key", "media_type", "overloaded", "gone", "slow"}:
        headers["Connection"] = "close"  # the body has not been read
    return JSONResponse(dialect.error(refusal, status), status, headers)


def _timing(scored: Scored) -> dict[str, str]:
    """Where the time went, as browsers and TEI's clients read it (ms)."""
    took = {stage: 1000 * seconds for stage, seconds in scored.stages().items()}
    found = {
        "server-timing": ", ".join(f"{stage};dur={each:.1f}" for stage, each in took.items()),
        "x-compute-tokens": str(scored.tokens),
        "x-total-time": f"{1000 * scored.seconds:.0f}",
        "x-queue-time": f"{took['queue']:.0f}",
        "x-inference-time": f"{took.get('forward', took['work']):.0f}",
    }
    return {**found, "x-tokenization-time": f"{took['tokenize']:.0f}"} if "tokenize" in took else found


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Do `work`, which is cancelled if the client closes the connection meanwhile."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal("gone", "the client has closed the connection")
        return await working
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _gone(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The scores", "content": {"application/json": {}, "text/event-stream": {}}}
}
REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused; the body is in the form of the dialect's errors.",
            "content": {"application/json": {}}},
    "5XX": {"description": "No server or no worker can do it at the moment.",
            "content": {"application/json": {}}},
}  # fmt: skip
"""What the document says of every path."""


def _schema(forms: tuple[Form, ...]) -> dict[str, object]:
    """The OpenAPI description of a body that has one of `forms`."""
    schemas = [_flat(form.body.model_json_schema()) for form in forms]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: each is replaced by what it stands for."""
    parts = schema.pop("$defs", {})

    def put(found: Any) -> Any:
        if isinstance(found, dict):
            name = found.get("$ref")
            return (
                put(parts[name.rpartition("/")[2]])
                if name
                else {key: put(each) for key, each in found.items()}
            )
        return [put(each) for each in found] if isinstance(found, list) else found

    flat: dict[str, Any] = put(schema)
    return flat
