"""What a worker has claimed: jobs it must answer for, and those of them that wait for their model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span
from rq import Queue
from rq.executions import Execution
from rq.job import Job

from jobs.spec import ScoreSpec, weights_key

if TYPE_CHECKING:
    from workers.engine.engine import Work

GROUP = 8
GROUP_SECONDS = 3.0
"""So many jobs, for so long, wait for others of their model before it takes the place of another."""


@dataclass
class Claim:
    """A job this worker took off its queue and has not answered for yet; its work, once that is known."""

    job: Job
    queue: Queue
    execution: Execution
    span: Span
    work: Work | None = None
    forward: Span = INVALID_SPAN


@dataclass(frozen=True)
class _Waiting:
    spec: ScoreSpec
    claim: Claim
    since: float = field(default_factory=time.monotonic)


class ModelQueue:
    """Claims whose model would take another's place, put aside so that those of one model are begun together.

    Otherwise models would push each other out job by job.
    """

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, spec: ScoreSpec, claim: Claim) -> None:
        """Put a claim aside."""
        self._waiting.append(_Waiting(spec, claim))

    def take(self, more_to_come: Callable[[], bool]) -> list[Claim]:
        """Those of the model that has waited longest, if they are many or old, or nothing more is to come."""
        if not self._waiting:
            return []
        oldest = self._waiting[0]
        early = len(self._waiting) < GROUP and time.monotonic() - oldest.since < GROUP_SECONDS
        if early and more_to_come():
            return []
        wanted = weights_key(oldest.spec)
        group = [waiting for waiting in self._waiting if weights_key(waiting.spec) == wanted]
        self._waiting = [waiting for waiting in self._waiting if waiting not in group]
        return [waiting.claim for waiting in group]
