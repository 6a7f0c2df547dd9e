"""Gives orders to live workers, and waits until their reports tell the outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import redis
from pydantic import BaseModel, ConfigDict

from rankmill.cluster.snapshot import WorkerState
from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.contract.spec import nearest
from rankmill.jobs.protocol.orders import OrderName, give_order
from rankmill.jobs.protocol.worker_report import WorkerReport, worker_reports
from rankmill.jobs.system import system

_LOOK_SECONDS = 0.2

TAKE_CHUNKS = frozenset({"idle", "busy"})


class WorkerOutOfReach(RankmillError):
    """Raised if a worker does not take orders: it is lost, its report cannot be read, or it is not a
    ScoringWorker.
    """


class OrderOutcome(BaseModel):
    """The outcome of an order to a worker, as far as it is known.

    - ``waiting``: the worker has not carried out the order, but still may.
    - ``gone``: the worker has ended, is lost or was started again, and will not carry out the order.
    """

    model_config = ConfigDict(frozen=True)

    worker: str
    order: OrderName
    state: Literal["done", "failed", "waiting", "gone"]
    text: str


def find_worker(workers: Iterable[WorkerState], name: str) -> WorkerState:
    """Find the worker called `name`, or the only one whose name begins with it.

    Raises
    ------
    InputError
        No worker matches, or several do.
    """
    by_name = {worker.name: worker for worker in workers}
    if found := whole_name(by_name, name):
        return by_name[found]
    hint = nearest(name, by_name)
    raise InputError(f"no worker is called {name}{hint}; rankmill workers lists them")


def whole_name(names: Iterable[str], name: str) -> str | None:
    """Return the name that a user means: `name` itself, or else the only one of `names` that begins with it.

    Return ``None`` if none begins with it. Raises `InputError` if several do.
    """
    matches = sorted({other for other in names if other.startswith(name)})
    if name in matches:
        return name
    if len(matches) > 1:
        shown = ", ".join(matches[:5])
        raise InputError(
            f"{len(matches)} workers begin with {name}: {shown}; give more characters of the name"
        )
    return matches[0] if matches else None


def unreachable(worker: WorkerState) -> str | None:
    """Return why a worker does not take orders (`OrderName`), or ``None`` if it takes them."""
    if worker.state == "foreign":
        return "is an RQ worker of another class than ScoringWorker, which takes no orders"
    if worker.state == "lost":
        return "is lost: it has sent no heartbeat for its lease and reads no orders"
    if worker.report is None:
        return "has a report that cannot be read; rankmill status says why"
    return None


def reachable(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Return those of `workers` that take orders (`OrderName`)."""
    return [worker for worker in workers if unreachable(worker) is None]


def queues_without(workers: Sequence[WorkerState], drained: Sequence[str]) -> list[str]:
    """Return the queues from which no worker takes chunks when the workers named in `drained` are drained."""
    theirs = {queue for worker in workers if worker.name in drained for queue in worker.queues}
    rest = [worker for worker in workers if worker.name not in drained and worker.state in TAKE_CHUNKS]
    return sorted(theirs - {queue for worker in rest for queue in worker.queues})


def order_workers(
    client: redis.Redis,
    workers: Sequence[WorkerState],
    order: OrderName,
    model: str | None = None,
    revision: str | None = None,
    *,
    wait_seconds: float,
) -> list[OrderOutcome]:
    """Give workers an order, and wait until they have carried it out or the time is over.

    Parameters
    ----------
    client
        A client of the server.
    workers, order
        The workers, and what they shall do.
    model, revision
        For an order about a model, its name, and the revision that it must have (``None`` for any).
    wait_seconds
        Longest wait; 0 for no wait. An order that was not carried out in time has the outcome ``waiting``,
        and is not withdrawn.

    Raises
    ------
    WorkerOutOfReach
        One of the workers does not take orders. In this case, no worker has got the order.
    """
    for worker in workers:
        if reason := unreachable(worker):
            raise WorkerOutOfReach(f"worker {worker.name} {reason}")
    started = {worker.name: worker.report.started for worker in workers if worker.report}
    orders = {
        name: give_order(client, name, order, started=start, model=model, revision=revision)
        for name, start in started.items()
    }
    if not wait_seconds:
        text = "has been told to; not waited for"
        return [OrderOutcome(worker=name, order=order, state="waiting", text=text) for name in orders]
    outcomes: dict[str, OrderOutcome] = {}
    deadline = system.monotonic() + wait_seconds
    while True:
        over = system.monotonic() >= deadline
        reports = worker_reports(client, [name for name in orders if name not in outcomes])
        for name in [name for name in orders if name not in outcomes]:
            state, text = _state(reports.get(name), orders[name], started[name])
            if state != "waiting" or over:
                outcomes[name] = OrderOutcome(worker=name, order=order, state=state, text=text)
        if len(outcomes) == len(orders):
            return [outcomes[name] for name in orders]
        system.sleep(_LOOK_SECONDS)


def _state(
    report: WorkerReport | None, order: str, started: float
) -> tuple[Literal["done", "failed", "waiting", "gone"], str]:
    if report is None:
        return "gone", "has ended, or is lost"
    if report.started != started:
        return "gone", "was started again; the new process has no such order"
    answer = next((answer for answer in report.answers if answer.order == order), None)
    if answer is None:
        age = max(system.now() - report.beat, 0.0)
        return "waiting", f"has not read the order yet; its last heartbeat was {age:.0f} s ago"
    return "waiting" if answer.state == "begun" else answer.state, answer.text
