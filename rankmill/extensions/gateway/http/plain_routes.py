"""The paths that belong to no dialect: health, metrics, usage, and models."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Path, Query
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rankmill.cluster.orders import OrderOutcome, order_workers, reachable
from rankmill.cluster.usage import listed
from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.dialects.routes import dialects
from rankmill.extensions.gateway.dialects.tei import known_info
from rankmill.extensions.gateway.gateway import Gateway, in_own_thread
from rankmill.extensions.gateway.http.dependencies import (
    Admin,
    Caller,
    Scraper,
    TheGateway,
    from_json,
    new_router,
)
from rankmill.extensions.gateway.http.document import json_body
from rankmill.extensions.gateway.keys.admission import check_model
from rankmill.extensions.gateway.refusals import wrong
from rankmill.jobs.contract.errors import NoWorkers
from rankmill.jobs.protocol.accounts import KEPT_DAYS, read_accounts
from rankmill.jobs.runtime.connection import unreachable
from rankmill.jobs.system import system

_WAIT_SECONDS = 60.0
"""The gateway waits at most this many seconds for workers to load or unload a model. An order that takes
longer stays in force, and the answer says so.
"""

logger = logging.getLogger(__name__)
router = new_router("gateway")
service_router = new_router("gateway")
"""Router of the paths that other rerank servers have, too, such as ``/health``. The gateway also has them
below the name of each dialect, such as ``/tei/health``.
"""


@service_router.get("/health", summary="Whether the gateway is alive")
@service_router.get("/ping", summary="Whether the gateway is alive")
async def health() -> Response:
    """Answers always, without asking Redis or workers. ``unix`` is the time in seconds since 1970, as in
    infinity's answers.
    """
    return JSONResponse({"status": "ok", "unix": system.now()})


@router.get("/ready", summary="Whether a worker has the gateway's model")
def ready(gateway: TheGateway) -> Response:
    """Answers 200 if Redis answers and a worker has the gateway's model, otherwise 503 with the reason."""
    reason = gateway.load.unready
    if away := unreachable(gateway.plain_redis):
        logger.warning("not ready: %s", away)
        reason = "the gateway's Redis does not answer"
    return JSONResponse({"status": reason or "ready"}, 503 if reason else 200)


@service_router.get("/version", summary="The gateway's version")
async def show_version() -> dict[str, str]:
    """The version of rankmill."""
    return {"version": version("rankmill")}


@service_router.get(
    "/metrics", summary="Metrics for Prometheus", response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)  # fmt: skip
async def show_metrics(gateway: TheGateway, key: Scraper) -> Response:
    """The metrics of this gateway's process, in Prometheus' text format."""
    return Response(generate_latest(metrics.REGISTRY), media_type=CONTENT_TYPE_LATEST)


@service_router.get("/v1/models", summary="The models that requests may name")
@service_router.get("/models", summary="The models that requests may name")
async def models(gateway: TheGateway, key: Caller, request: Request) -> dict[str, Any]:
    """The models that the caller may name, with the fields that clients of each dialect read."""
    shown = [model.name for model in gateway.served.all if key is None or key.may_use(*model)]
    data = [_model(gateway, name, request) for name in shown]
    return {"object": "list", "data": data, "models": data}


@service_router.get("/v1/models/{id:path}", summary="A model that requests may name")
async def find_model(
    gateway: TheGateway, key: Caller, request: Request, name: Annotated[str, Path(alias="id")]
) -> dict[str, Any]:
    """One entry of the list of models, by its name."""
    model = gateway.served.resolve(name)
    check_model(key, model)
    return _model(gateway, model.name, request)


def _model(gateway: Gateway, name: str, request: Request) -> dict[str, Any]:
    requests = gateway.load.requests
    prefix = request.url.path.lstrip("/").partition("/")[0]
    # At infinity's paths, infinity's client expects "infinity" as the owner.
    owner = prefix if prefix in dialects() else gateway.own.gateway_dialect
    return {
        "id": name, "object": "model", "created": gateway.created, "owned_by": owner or "rankmill",
        # fields of vLLM
        "root": name, "parent": None, "max_model_len": gateway.settings.max_length,
        "backend": "rankmill", "capabilities": ["rerank"],  # infinity
        "stats": {
            "queue_fraction": requests / gateway.own.gateway_requests, "queue_absolute": requests,
            "results_pending": requests,
        },
        "name": name, "endpoints": ["rerank"], "default_endpoints": ["rerank"], "finetuned": False,  # Cohere
    }  # fmt: skip


@service_router.get("/info", summary="TEI: the gateway's model and limits")
async def info(gateway: TheGateway, key: Caller) -> dict[str, Any]:
    """The facts about the gateway's model that a worker reports, and how the model's latest scores
    were made.
    """
    facts = await gateway.scoring.about_model()
    scored = gateway.scoring.contracts[gateway.served.default.model]
    return {
        **known_info(gateway.settings, gateway.served.default.name, facts, scored, gateway.load.workers),
        "sha": None,
        "docker_label": None,
        "model_type": {
            "reranker": {
                "id2label": {str(number): label for number, label in enumerate(facts.labels)},
                "label2id": {label: number for number, label in enumerate(facts.labels)},
            }
        },
        "max_batch_requests": None,
        "auto_truncate": True,
        "scores": scored,
    }


@router.get("/v1/usage", summary="What the caller has used, by day, model and device")
def usage(
    gateway: TheGateway,
    key: Caller,
    days: Annotated[int, Query(ge=1, le=KEPT_DAYS, description="Number of days, including today.")] = 30,
) -> dict[str, Any]:
    """The usage by day, model and device.

    - With an admin's key, the usage of everyone.
    - With another key, the usage of all keys of the same name.
    - Without a key, the usage of the gateway's own tenant (the setting ``tenant``).
    """
    if key and key.admin:
        return {"object": "list", **listed(read_accounts(gateway.plain_redis, days))}
    accounts = read_accounts(gateway.plain_redis, days, key.name if key else gateway.settings.tenant)
    return {"object": "list", **listed(accounts, gateway.served.public)}


class ModelOrder(BaseModel):
    """The body of an order to load or unload a model. To unload all models, leave out ``model``."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, min_length=1, max_length=1000)


AnOrder = Annotated[ModelOrder, from_json(ModelOrder)]
_ORDER = json_body(ModelOrder)


@router.get("/v1/cache", summary="The models that workers have loaded (admin)")
def loaded_models(gateway: TheGateway, key: Admin) -> dict[str, Any]:
    """The workers of the gateway's queue with their loaded models. ``hits`` counts the chunks whose model was
    already loaded.
    """
    data = [
        {
            "worker": worker.name,
            "state": worker.state,
            "models": list(worker.report.models),
            "hits": worker.report.model_hits,
            "loads": worker.report.model_loads,
            "resident_bytes": worker.report.resident_bytes,
        }
        for worker in gateway.workers()
        if worker.report
    ]
    return {"object": "list", "data": data}


@router.post("/v1/cache/warm", summary="Let all workers load a model (admin)", openapi_extra=_ORDER)
async def warm_model(gateway: TheGateway, key: Admin, order: AnOrder) -> dict[str, Any]:
    """Let all workers of the gateway's queue load a model; returns the outcome at each worker."""
    outcomes = await in_own_thread(_warm, gateway, order)
    return {"object": "list", "data": [outcome.model_dump() for outcome in outcomes]}


def _warm(gateway: Gateway, order: ModelOrder) -> list[OrderOutcome]:
    if order.model is None:
        raise wrong("model", "name the model to load")
    model = gateway.served.resolve(order.model).model
    workers = reachable(gateway.workers())
    if not workers:
        why = f"queue {gateway.settings.queue!r} has no worker that takes orders"
        raise NoWorkers(why, "start one: rankmill score-workers")
    return order_workers(gateway.plain_redis, workers, "warm", model, wait_seconds=_WAIT_SECONDS)


@router.post(
    "/v1/cache/clear", summary="Let all workers unload a model, or all models (admin)", openapi_extra=_ORDER
)
async def clear_models(gateway: TheGateway, key: Admin, order: AnOrder) -> dict[str, Any]:
    """Let the workers of the gateway's queue unload a model, or all models; returns the outcome at each
    worker.
    """
    workers = reachable(await in_own_thread(gateway.workers))
    loaded = {name for worker in workers if worker.report for name in worker.report.models}

    def unload(name: str) -> list[OrderOutcome]:
        having = [worker for worker in workers if worker.report and name in worker.report.models]
        return order_workers(gateway.plain_redis, having, "unload", name, wait_seconds=_WAIT_SECONDS)

    wanted = None if order.model is None else {order.model, gateway.served.known(order.model)}
    names = sorted(loaded if wanted is None else loaded & wanted)
    # Unload all models at the same time, because each call waits for the workers' heartbeats.
    unloaded = await asyncio.gather(*(in_own_thread(unload, name) for name in names))
    return {"object": "list", "data": [outcome.model_dump() for outcomes in unloaded for outcome in outcomes]}
