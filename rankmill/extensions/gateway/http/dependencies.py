"""FastAPI dependencies for paths without a dialect: the gateway, the caller, and the request's body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rankmill.extensions.gateway.bodies import parse
from rankmill.extensions.gateway.dialects.base import read_as
from rankmill.extensions.gateway.gateway import Gateway, Right
from rankmill.extensions.gateway.http.document import REFUSALS
from rankmill.extensions.gateway.keys.admission import MOST_WAIT, key_text
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.observation import observation
from rankmill.jobs.runtime.patience import waiting

T = TypeVar("T", bound=BaseModel)


class _ObservedRoute(APIRoute):
    """A FastAPI route that notes its path for the metrics. A request to it waits at most `MOST_WAIT` seconds
    for a Redis server that cannot serve.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def observed(request: Request) -> Response:
            observation(request.scope).route = self.path
            with waiting(most=MOST_WAIT):
                return await answer(request)

        return observed


def new_router(tag: str, prefix: str = "") -> APIRouter:
    """Make a FastAPI router for paths without a dialect, such as ``/health``. Metrics count its requests by
    path.
    """
    return APIRouter(prefix=prefix, tags=[tag], route_class=_ObservedRoute, responses=REFUSALS)


async def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


TheGateway = Annotated[Gateway, Depends(_gateway)]


async def _caller(request: Request, gateway: TheGateway) -> ApiKey | None:
    return await gateway.identify(observation(request.scope), request.headers)


Caller = Annotated[ApiKey | None, Depends(_caller)]
"""Parameter type for FastAPI's path functions: the caller's API key. It is ``None`` if the caller has
no valid key and needs none.
"""


async def _scraper(request: Request, gateway: TheGateway) -> None:
    if not gateway.own.gateway_open_metrics:
        key = await gateway.admission.identify_scraper(key_text(request.headers))
        observation(request.scope).key = key.name if key else ""


Scraper = Annotated[None, Depends(_scraper)]
"""Parameter type for FastAPI's path functions. A path with such a parameter refuses callers that may not read
metrics.
"""


def _holder_of(right: Right) -> Any:
    async def check(gateway: TheGateway, key: Caller) -> ApiKey | None:
        gateway.require(key, right)
        return key

    return Depends(check)


Admin = Annotated[ApiKey | None, _holder_of("admin")]
ModelManager = Annotated[ApiKey | None, _holder_of("manage_models")]
"""Parameter type for FastAPI's path functions: the caller's API key, which may manage models. Other callers
are refused. If no keys exist, the parameter is ``None``.
"""


def from_json(kind: type[T]) -> Any:
    """Make a FastAPI dependency that reads a request's JSON body as an object of the class `kind`."""

    async def read(request: Request, gateway: TheGateway, key: Caller) -> T:
        async with gateway.admission.admitted(key):
            with gateway.bodies.body() as body:
                return read_as(kind, parse(await body.read(request)))

    return Depends(read)
