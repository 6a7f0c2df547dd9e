"""Makes the gateway's FastAPI application, with all paths, the middleware and the answers to errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from rankmill.extensions.gateway.dialects.base import wrong_field
from rankmill.extensions.gateway.dialects.routes import dialect_at, dialects
from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.http import plain_routes
from rankmill.extensions.gateway.http.document import operation_id, with_keys
from rankmill.extensions.gateway.http.middleware import KnownHosts, Observed
from rankmill.extensions.gateway.http.page_routes import page_router
from rankmill.extensions.gateway.http.responses import refused
from rankmill.extensions.gateway.http.score_routes import score_router
from rankmill.extensions.gateway.observation import HEADER, observation
from rankmill.extensions.gateway.refusals import EXPECTED, Refusal, refusal_of

_ABOUT = (
    "Scores of queries and passages, in the forms that clients of TEI, Cohere, Jina, vLLM, infinity and "
    "Voyage know. Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`."
)


def make_app(gateway: Gateway, *, is_loopback: bool = False) -> FastAPI:
    """Make the FastAPI application that serves a gateway's paths.

    Parameters
    ----------
    gateway
        The gateway's parts.
    is_loopback
        Whether the gateway listens on a loopback address. If so, or if the setting ``gateway_hosts`` names
        hosts, requests with an unknown name in the Host header are refused.
    """
    own = gateway.own

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(work)
            for work in (
                gateway.load.watch(),
                gateway.admission.watch(),
                gateway.admission.renew(),
                gateway.warm(),
                *map(gateway.work, gateway.additions),
            )
        ]
        yield
        await gateway.close(tasks)

    app = _App(
        title="rankmill", version=version("rankmill"), description=_ABOUT, lifespan=lifespan,
        docs_url=None, redoc_url=None, generate_unique_id_function=operation_id, redirect_slashes=False,
    )  # fmt: skip
    app.state.gateway = gateway
    for kind in (*EXPECTED, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    added = [addition.router for addition in gateway.additions if addition.router]
    for router in (
        score_router(own.gateway_dialect), plain_routes.router, plain_routes.service_router, *added,
        page_router(),
    ):  # fmt: skip
        app.include_router(router)
    for name in dialects():
        app.include_router(plain_routes.service_router, prefix=f"/{name}", include_in_schema=False)
    if own.gateway_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(own.gateway_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["authorization", "content-type", "x-api-key", HEADER],
            expose_headers=[HEADER, "retry-after", "server-timing"],
        )  # fmt: skip
    if is_loopback or own.gateway_hosts:
        app.add_middleware(KnownHosts, names=own.gateway_hosts)
    app.add_middleware(Observed)
    return app


class _App(FastAPI):
    """An application whose OpenAPI document names the two headers that may carry an API key."""

    def openapi(self) -> dict[str, Any]:
        return with_keys(super().openapi())


async def _refuse(request: Request, error: Exception) -> Response:
    """Make the HTTP answer to a failed request, in the dialect of its body or else of its path."""
    path = request.url.path
    dialect = dialects().get(observation(request.scope).dialect) or dialect_at(path)
    if isinstance(error, RequestValidationError):
        # Leave out the first part of pydantic's ``loc``: it is only the kind of parameter, such as "query".
        wrong = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        return refused(dialect, wrong_field(wrong))
    if not isinstance(error, HTTPException):
        gateway: Gateway = request.app.state.gateway
        answer = refused(dialect, refusal_of(error, gateway.names))
        if request.method == "PUT":
            answer.headers["Connection"] = "close"  # the client may still send the rest of its upload
        return answer
    if error.status_code == 405:
        refusal = Refusal("method", f"{path:.100} does not take {request.method:.20}")
    else:
        refusal = Refusal("not_found", f"there is no path {path:.100}; /docs lists all paths")
    answer = refused(dialect, refusal)
    answer.headers.update(error.headers or {})
    return answer
