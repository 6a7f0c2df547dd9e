"""Orders that operators give to live workers, and the workers' answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import redis
from pydantic import Field
from redis.client import Pipeline

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.schema import Seconds, WireModel
from rankmill.jobs.system import system

ORDER_SECONDS = 3600
"""Unread orders to a worker expire this many seconds after the latest one."""

MAX_ORDERS = 100
"""At most this many unread orders wait for one worker; the oldest are dropped."""

OrderName = Literal["drain", "resume", "warm", "unload"]


class Order(WireModel):
    """An operator's order to one worker process.

    Attributes
    ----------
    what
        What the worker shall do.
    started
        When the process started, as in its report. Another process of the same name ignores the order.
    model
        The model to ``warm`` or ``unload``; ``None`` for other orders.
    revision
        The revision, such as the digest of the files, that a model to ``warm`` must have; ``None`` for any.
    """

    id: str = Field(min_length=1)
    what: OrderName
    started: Seconds
    model: str | None = Field(default=None, min_length=1)
    revision: str | None = None


class Answer(WireModel):
    """The result of an order, for the operator; ``order`` is the order's id."""

    order: str
    state: Literal["begun", "done", "failed"]
    text: str


def give_order(
    client: redis.Redis,
    worker: str,
    what: OrderName,
    *,
    started: float,
    model: str | None = None,
    revision: str | None = None,
) -> str:
    """Write an order for a worker to Redis, and return the order's id. The worker reads the order with its
    next heartbeat.
    """
    order = Order(id=system.unique_id(), what=what, started=started, model=model, revision=revision)
    key = keys.orders(worker)
    with client.pipeline() as pipe:
        pipe.rpush(key, order.written())
        pipe.ltrim(key, -MAX_ORDERS, -1)
        pipe.expire(key, ORDER_SECONDS)
        pipe.execute()
    return order.id


def ask_for_orders(pipe: Pipeline, worker: str, read: Sequence[bytes]) -> None:
    """Add commands to `pipe` that delete some orders of a worker, and then list the worker's other orders.

    Parameters
    ----------
    pipe
        The pipeline.
    worker
        Name of the worker.
    read
        The orders to delete, which the worker has read.
    """
    key = keys.orders(worker)
    for raw in read:  # by value, so that a repeated transaction deletes no other order
        pipe.lrem(key, 1, raw)  # type: ignore[arg-type]  # redis-py accepts bytes too
    pipe.lrange(key, 0, -1)
