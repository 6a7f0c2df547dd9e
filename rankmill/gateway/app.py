"""The gateway's FastAPI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from rankmill.gateway.dialects.routes import dialect_at
from rankmill.gateway.gateway import Gateway
from rankmill.gateway.http.batch_routes import BatchRoutes
from rankmill.gateway.http.hosts import KnownHosts
from rankmill.gateway.http.observed import Observed
from rankmill.gateway.http.page_routes import page_router
from rankmill.gateway.http.plain_routes import plain_router
from rankmill.gateway.http.registry_routes import RegistryRoutes
from rankmill.gateway.http.score_routes import refused, score_router
from rankmill.gateway.keys.admission import KeysNeeded
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.seen import HEADER
from rankmill.jobs.runtime.settings import Settings

_ABOUT = (
    "Scores of queries and passages, in the forms that clients of TEI, Cohere, Jina, vLLM, infinity and "
    "Voyage know. Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`."
)


def make_app(settings: Settings, redis_url: str, needed: KeysNeeded, *, is_loopback: bool = False) -> FastAPI:
    """The application for the workers of a server.

    Parameters
    ----------
    settings, redis_url
        The settings, and the server.
    needed
        Whether requests need keys.
    is_loopback
        Whether it is served on an address that only this host reaches: then, as with `gateway_hosts`, it
        answers to known names only.

    Raises
    ------
    ConfigError
        A setting does not fit.
    """
    gateway = Gateway(settings, redis_url, needed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (gateway.capacity.watch(), gateway.sweep())]
        yield
        await gateway.close(tasks)

    app = FastAPI(
        title="rankmill", version=version("rankmill"), description=_ABOUT, lifespan=lifespan,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.add_exception_handler(HTTPException, _nothing_there)
    app.state.gateway = gateway
    app.include_router(score_router(gateway))
    app.include_router(plain_router(gateway, int(time.time())))
    app.include_router(BatchRoutes(gateway).router())
    app.include_router(RegistryRoutes(gateway).router())
    app.include_router(page_router())
    if settings.gateway_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.gateway_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["authorization", "content-type", "x-api-key", HEADER], expose_headers=[HEADER],
        )  # fmt: skip
    if is_loopback or settings.gateway_hosts:
        app.add_middleware(KnownHosts, names=settings.gateway_hosts)
    app.add_middleware(Observed)
    return app


async def _nothing_there(request: Request, error: Exception) -> Response:
    """The answer where no path, or not this method of it, is the gateway's."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        refusal = Refusal("method", f"{path:.100} does not take {request.method:.20}")
    else:
        refusal = Refusal("not_found", f"there is no path {path:.100}; /docs lists those that there are")
    answer = refused(dialect_at(path), refusal)
    answer.headers.update(error.headers or {})
    return answer
