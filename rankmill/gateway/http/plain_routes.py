"""The paths that are no dialect's: models, health, metrics, and the workers' loaded models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.gateway import metrics
from rankmill.gateway.bodies import parse
from rankmill.gateway.dialects.base import read_as
from rankmill.gateway.dialects.routes import dialect_at
from rankmill.gateway.http.score_routes import REFUSED, refused
from rankmill.gateway.keys.admission import MOST_WAIT
from rankmill.gateway.refusals import EXPECTED, Refusal, refusal_of
from rankmill.gateway.seen import seen
from rankmill.gateway.workers import clear_models, loaded_models, warm_model
from rankmill.jobs.runtime.connection import unreachable
from rankmill.jobs.runtime.patience import waiting

if TYPE_CHECKING:
    from rankmill.gateway.gateway import Gateway

Answer = Callable[[Request], Awaitable[Response]]


class ModelOrder(BaseModel):
    """Which model workers are to load, or to unload; ``None``: all that they have loaded."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, min_length=1, max_length=1000)


def plain_router(gateway: Gateway, created: int) -> APIRouter:
    """The router of these paths; `created` is the gateway's start, in seconds since 1970."""
    router = APIRouter()

    add = documented(router, "gateway")

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        reason = await asyncio.to_thread(unreachable, gateway.plain_redis)
        return JSONResponse({"status": reason or "ready"}, 503 if reason else 200)

    async def show_metrics(request: Request) -> Response:
        await gateway.key(request)
        return Response(generate_latest(metrics.REGISTRY), media_type=CONTENT_TYPE_LATEST)

    async def models(request: Request) -> Response:
        key = await gateway.key(request)
        served = [name for name in gateway.scoring.models if key is None or key.may_use(name)]
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "rankmill"} for name in served
        ]
        return JSONResponse({"object": "list", "data": data})

    async def info(request: Request) -> Response:
        await gateway.key(request)
        return JSONResponse(tei_info(gateway))

    async def cache(request: Request) -> Response:
        await gateway.admin(request)
        return JSONResponse(
            await asyncio.to_thread(loaded_models, gateway.plain_redis, gateway.settings.queue)
        )

    async def warm(request: Request) -> Response:
        await gateway.admin(request)
        model = (await _order(gateway, request)).model
        if model is None:
            raise Refusal("invalid", "model: name the model to load", param="model")
        gateway.scoring.model(model)
        redis, queue = gateway.plain_redis, gateway.settings.queue
        return JSONResponse(await asyncio.to_thread(warm_model, redis, queue, model))

    async def clear(request: Request) -> Response:
        await gateway.admin(request)
        model = (await _order(gateway, request)).model
        redis, queue = gateway.plain_redis, gateway.settings.queue
        return JSONResponse(await asyncio.to_thread(clear_models, redis, queue, model))

    order = {"requestBody": {"content": {"application/json": {"schema": ModelOrder.model_json_schema()}}}}
    add("/health", "GET", "Whether the gateway is alive", health)
    add("/ready", "GET", "Whether the gateway reaches its Redis server", ready)
    add("/metrics", "GET", "Metrics for Prometheus", show_metrics, media=("text/plain",))
    for path in ("/v1/models", "/models"):
        add(path, "GET", "The models that requests may name", models)
    for path in ("/info", "/tei/info"):
        add(path, "GET", "TEI: the gateway's model and limits", info)
    add("/v1/cache", "GET", "The models that workers have loaded (admin)", cache)
    add("/v1/cache/warm", "POST", "Have all workers load a model (admin)", warm, **order)
    add(
        "/v1/cache/clear",
        "POST",
        "Have all workers unload a model, or all (admin)",
        clear,
        **order,
    )
    return router


def tei_info(gateway: Gateway) -> dict[str, Any]:
    """TEI's description of its model: what is known here without the model."""
    settings = gateway.settings
    return {
        "version": version("rankmill"),
        "sha": None,
        "docker_label": None,
        "model_id": settings.model,
        "model_sha": settings.revision,
        "model_dtype": settings.precision,
        "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
        "max_concurrent_requests": settings.gateway_requests,
        "max_client_batch_size": settings.gateway_pairs,
        "max_input_length": settings.max_length,
        "max_batch_tokens": None,
        "max_batch_requests": None,
        "tokenization_workers": None,
        "auto_truncate": True,
    }


def guarded(path: str, answer: Answer) -> Answer:
    """`answer`, counted by its path, with refusals in the form that suits its clients."""

    async def guarded(request: Request) -> Response:
        seen(request.scope).route = path
        try:
            with waiting(most=MOST_WAIT):
                return await answer(request)
        except EXPECTED as error:
            return refused(dialect_at(path), refusal_of(error))

    return guarded


async def _order(gateway: Gateway, request: Request) -> ModelOrder:
    with gateway.bodies.hold() as held:
        raw = await held.read(request)
        return read_as(ModelOrder, parse(raw or b"{}"))


def documented(router: APIRouter, tag: str) -> Callable[..., None]:
    """What adds a path to `router`: ``add(path, method, summary, answer, media=…, statuses=…, **more)``.

    The names in the path are its parameters. `media` has the types of its answers with one of the `statuses`;
    `more` is what else the OpenAPI document says of it.
    """

    def add(
        path: str, method: str, summary: str, answer: Answer, *, media: Sequence[str] = ("application/json",),
        statuses: Sequence[int] = (200,), **more: Any,
    ) -> None:  # fmt: skip
        named = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ]
        extra = {"parameters": [*named, *more.pop("parameters", [])], **more}
        done = {"description": "Done", "content": {kind: {} for kind in media}}
        words = path.replace("{", "").replace("}", "").replace("/", "_")
        router.add_api_route(
            path, guarded(path, answer), methods=[method], summary=summary, openapi_extra=extra,
            operation_id=f"{method.lower()}{words}", response_model=None, response_class=Response, tags=[tag],
            responses={**dict.fromkeys(statuses, done), **REFUSED},
        )  # fmt: skip

    return add
