"""The HTTP paths that take texts, and answer with scores or tokens, in the dialects of rerank services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar
from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.bodies import parse
from rankmill.extensions.gateway.dialects.base import Body, ScorePath, read_as
from rankmill.extensions.gateway.dialects.routes import score_paths
from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.http.document import REFUSALS, json_body
from rankmill.extensions.gateway.http.responses import event, event_stream
from rankmill.extensions.gateway.observation import Observation, observation
from rankmill.extensions.gateway.refusals import EXPECTED, Refusal, refusal_of
from rankmill.extensions.gateway.score_request import RequestScores
from rankmill.extensions.gateway.scoring import SubmittedRequest

_PLAIN = " ()=,:/+;"
"""Characters that stay as they are in a header's value, besides letters, digits and ``_.-~``. All others are
percent-encoded.
"""

T = TypeVar("T")


def score_router(owner: str | None) -> APIRouter:
    """Make the router of all dialects' paths, such as ``/v1/rerank`` and ``/cohere/v1/rerank``.

    Parameters
    ----------
    owner
        Name of the dialect that gets a path such as ``/v1/rerank`` if several dialects have it. With
        ``None``, the dialects share such a path.
    """
    router = APIRouter()
    scores = {"description": "The scores", "content": {"application/json": {}, "text/event-stream": {}}}
    for path in score_paths(owner):
        has_prefix = path.path.startswith(f"/{path.dialect.name}/")
        owners = [path.dialect] if has_prefix else [body.dialect for body in path.bodies]
        router.add_api_route(
            path.path, _endpoint(path), methods=["POST"], summary=path.summary, response_class=Response,
            responses={200: scores, **REFUSALS}, openapi_extra=json_body(*path.bodies),
            tags=[*dict.fromkeys(dialect.name for dialect in owners)],
        )  # fmt: skip
    return router


def _endpoint(path: ScorePath) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        """Score the body's texts, and answer in the dialect of the body."""
        gateway: Gateway = request.app.state.gateway
        note = observation(request.scope)
        note.route, note.dialect = path.path, path.dialect.name
        async with AsyncExitStack() as stack:
            key = await stack.enter_async_context(gateway.admitted(note, request.headers))
            raw = stack.enter_context(gateway.bodies.body())
            sent = parse(await raw.read(request))
            kind = path.body(sent)
            note.dialect = kind.dialect.name
            body = read_as(kind, sent)
            wanted = path.score_request(body, sent)
            metrics.stages.labels("admission").observe(time.perf_counter() - note.began)
            if body.stream or _wants_events(request):
                run = await stack.enter_async_context(gateway.scoring.begin(wanted, key))
                ends = stack.pop_all()
                return event_stream(_events(gateway, note, run, body, ends), ends)
            scores = await _unless_gone(request, gateway.scoring.score(wanted, key))
            gateway.count(note, scores)
            return JSONResponse(body.answer(scores), headers=_timing(scores) | _contract(scores))

    return answer


def _wants_events(request: Request) -> bool:
    """Return whether the request's client accepts nothing but server-sent events. A client that also accepts
    JSON gets JSON.
    """
    accepted = request.headers.get("accept", "").lower().split(",")
    return {media_type.partition(";")[0].strip() for media_type in accepted} == {"text/event-stream"}


async def _events(
    gateway: Gateway, note: Observation, run: SubmittedRequest, body: Body, ends: AsyncExitStack
) -> AsyncGenerator[bytes]:
    """Yield a request's scores as server-sent events: an event ``scores`` for each chunk and a last event
    ``result``. If the request fails, the last event is ``error``.
    """
    values: list[object] = []
    try:
        async with ends:
            async for chunk in run.chunks():
                values += chunk["scores"]
                yield event("scores", chunk)
            scores = run.result(values)
            gateway.count(note, scores)
            result = event("result", body.answer(scores))
        yield result  # the request has ended by now, because its client may send the next one
    except EXPECTED as error:
        refusal = refusal_of(error, gateway.names)
        yield event("error", body.dialect.error(refusal, body.dialect.status(refusal)))


def _timing(scores: RequestScores) -> dict[str, str]:
    """Return HTTP headers with the request's number of tokens and the time of each stage in ms.

    Browsers show ``server-timing``; TEI's clients read the headers ``x-...``.
    """
    took = {stage: 1000 * seconds for stage, seconds in scores.stages().items()}
    return {
        "server-timing": ", ".join(f"{stage};dur={milliseconds:.1f}" for stage, milliseconds in took.items()),
        "x-compute-tokens": str(scores.tokens),
        "x-total-time": f"{1000 * scores.seconds:.0f}",
        "x-tokenization-time": f"{took['tokenize']:.0f}",
        "x-queue-time": f"{took['queue']:.0f}",
        "x-inference-time": f"{took['forward']:.0f}",
    }


def _contract(scores: RequestScores) -> dict[str, str]:
    """Return HTTP headers that say how the scores were made, such as ``x-score-precision``."""
    return {f"x-score-{name}": quote(value, safe=_PLAIN) for name, value in scores.contract.items()}


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work` and return its result. If the request's client closes the connection meanwhile, cancel
    `work`, and raise `Refusal`.
    """
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
    while (await request.receive())["type"] != "http.disconnect":
        pass
