"""The models that the workers of a queue have loaded, and orders to load and unload them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis

from rankmill.cluster.orders import OrderOutcome, order_workers, reachable
from rankmill.cluster.snapshot import WorkerState, read_cluster
from rankmill.jobs.contract.errors import NoWorkers

_WAIT_SECONDS = 60.0
"""Longest wait for workers to carry out an order; it stays then, and the answer says so."""


def loaded_models(client: redis.Redis, queue: str) -> dict[str, Any]:
    """Each worker of the queue with its models, and how often a chunk found its model loaded."""
    data = [
        {
            "worker": worker.name,
            "state": worker.state,
            "models": list(worker.report.models),
            "hits": worker.report.model_hits,
            "loads": worker.report.model_loads,
            "resident_bytes": worker.report.resident_bytes,
        }
        for worker in _workers(client, queue)
        if worker.report
    ]
    return {"object": "list", "data": data}


def warm_model(client: redis.Redis, queue: str, model: str) -> dict[str, Any]:
    """Have all workers of the queue load a model; returns what became of it in each.

    Raises
    ------
    NoWorkers
        The queue has no worker that takes orders.
    """
    workers = reachable(_workers(client, queue))
    if not workers:
        raise NoWorkers(
            f"queue {queue!r} has no worker that takes orders", "start one: rankmill score-workers"
        )
    found = order_workers(client, workers, "warm", model, wait_seconds=_WAIT_SECONDS)
    return {"object": "list", "data": [each.model_dump() for each in found]}


def clear_models(client: redis.Redis, queue: str, model: str | None) -> dict[str, Any]:
    """Have the workers that have loaded a model unload it; ``None``: all models."""
    workers = reachable(_workers(client, queue))
    loaded = {name for worker in workers if worker.report for name in worker.report.models}

    def unload(name: str) -> list[OrderOutcome]:
        having = [worker for worker in workers if worker.report and name in worker.report.models]
        return order_workers(client, having, "unload", name, wait_seconds=_WAIT_SECONDS)

    names = sorted(loaded if model is None else loaded & {model})
    with ThreadPoolExecutor(8) as threads:  # all wait for the same heartbeats
        found = [each for outcomes in threads.map(unload, names) for each in outcomes]
    return {"object": "list", "data": [each.model_dump() for each in found]}


def _workers(client: redis.Redis, queue: str) -> list[WorkerState]:
    return [worker for worker in read_cluster(client).workers if queue in worker.queues]
