"""A reranking service with FastAPI: each request is a run, and all of them share batches in the workers.

pip install fastapi uvicorn
REDIS_URL=redis://queue-host:6379/0 uvicorn examples.fastapi_service:app
curl localhost:8000/rerank --json '{"query": "how far is the moon", "passages": ["384,400 km.", "Cheese."]}'
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from rankmill import AsyncClient, RankmillError

TIMEOUT = 30

T = TypeVar("T")


class Query(BaseModel):
    """What a caller sends."""

    query: str
    passages: list[str] = Field(max_length=1000)
    top_k: int | None = None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one client for all requests while the service runs."""
    async with AsyncClient(model=os.environ.get("MODEL", "demo")) as app.state.client:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/rerank")
async def rerank(asked: Query, request: Request) -> list[dict[str, Any]]:
    """Passages by their numbers, the best first."""
    client: AsyncClient = request.app.state.client
    ranked = await unless_gone(
        request, client.rank(asked.query, asked.passages, top_k=asked.top_k, timeout=TIMEOUT)
    )
    return [
        {"index": each.index, "score": None if each.error else each.score, "error": each.error}
        for each in ranked
    ]


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work`; if the caller disconnects first, cancel `work` and thereby its run."""

    async def caller_goes() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(caller_goes())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the caller has gone")
        return await working
    finally:
        working.cancel()
        gone.cancel()


@app.exception_handler(RankmillError)
async def unavailable(request: Request, error: RankmillError) -> JSONResponse:
    """Say in one line what is missing, such as workers, the server or time."""
    return JSONResponse({"error": str(error)}, status_code=503)
