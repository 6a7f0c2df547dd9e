"""The workers of a cluster, as `rankmill.cluster.snapshot` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict
from rq.defaults import RQ_KEY_PREFIX

from rankmill.cluster.damage import Damage
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.protocol.worker_report import SCORING_FIELD, WorkerReport

WORKER_PREFIX = f"{RQ_KEY_PREFIX}:worker:"
_WORKER_FIELDS = ("queues", "state", "birth", "death", "last_heartbeat", SCORING_FIELD)

WorkerStateName = Literal["idle", "busy", "draining", "drained", "lost", "foreign"]
"""The state of a worker.

``draining``: it takes no new chunks and has some left; ``drained``: it has none left; ``lost``: a
ScoringWorker without a heartbeat for its lease; ``foreign``: an RQ worker of another class.
"""


class WorkerState(BaseModel):
    """A worker; ``report`` is its own report, ``None`` if it has none or the report has expired."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    name: str
    queues: tuple[str, ...]
    state: WorkerStateName
    beat_seconds: float | None
    report: WorkerReport | None


def read_workers(
    client: redis.Redis, names: list[str], now: float, damage: Damage
) -> tuple[WorkerState, ...]:
    """The workers of RQ's list that have not ended."""
    nothing = [None] * len(_WORKER_FIELDS)
    expected: list[tuple[str, Any]] = []
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(WORKER_PREFIX + name, *_WORKER_FIELDS)
            pipe.get(keys.worker(name))
            expected += [(WORKER_PREFIX + name, nothing), (keys.worker(name), None)]
        replies = damage.replies(pipe, expected)
    found = []
    for name, fields, raw in zip(names, replies[::2], replies[1::2], strict=True):
        known = dict(zip(_WORKER_FIELDS, fields, strict=True))
        # RQ's list still has the name of a worker whose hash has expired.
        if (raw or known["birth"]) and not known["death"]:
            found.append(_worker(name, known, raw, now, damage))
    return tuple(found)


def _worker(
    name: str, known: Mapping[str, bytes | None], raw: bytes | None, now: float, damage: Damage
) -> WorkerState:
    report = None
    if raw is not None:
        try:
            report = WorkerReport.read_json(raw, "the report")
        except WireError as error:
            damage.note(keys.worker(name), error)
    state: WorkerStateName = "idle"
    if raw is None:
        state = "lost" if known[SCORING_FIELD] else "foreign"
    elif report and report.drained:
        state = "draining" if report.claimed_jobs else "drained"
    elif known["state"] == b"busy":
        state = "busy"
    key = WORKER_PREFIX + name
    queues = damage.text(known["queues"] or b"", key) or ""
    beat = report.beat if report else damage.seconds(known["last_heartbeat"], key)
    age = None if beat is None else max(now - beat, 0.0)
    return WorkerState(
        name=name, queues=tuple(filter(None, queues.split(","))), state=state, beat_seconds=age, report=report
    )
