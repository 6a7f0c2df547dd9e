"""The gateway's FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from jobs.runtime.settings import Settings
from rankmill.gateway.gateway import Gateway
from rankmill.gateway.http.score_routes import score_router
from rankmill.gateway.keys.admission import KeysNeeded


def make_app(settings: Settings, redis_url: str, needed: KeysNeeded) -> FastAPI:
    """The application for the workers of the server at `redis_url`; `needed`: whether requests need keys.

    Raises
    ------
    ConfigError
        A setting does not fit.
    """
    gateway = Gateway(settings, redis_url, needed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.close()

    app = FastAPI(title="rankmill", version=version("rankmill"), lifespan=lifespan)
    app.state.gateway = gateway
    app.include_router(score_router(gateway))

    @app.get("/health", summary="Whether the gateway is alive")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app
