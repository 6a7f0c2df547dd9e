"""What a worker has claimed: jobs it must answer for, and those of them that wait for their model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span
from rq import Queue
from rq.executions import Execution

from jobs.run import Run
from jobs.spec import ScoreSpec, WeightsKey, weights_key
from workers.rq_job import ScoringJob

if TYPE_CHECKING:
    from workers.engine.engine import Engine, Work

GROUP = 8
GROUP_SECONDS = 3.0
"""So many jobs, for so long, wait for others of their model before it takes the place of another."""


@dataclass(eq=False)
class Claim:
    """A job this worker took off its queue and has not answered for yet.

    ``run`` is known once it was read from Redis, ``engine`` and ``work`` once the chunk's pairs were
    fetched and tokenized. The job was ``claimed`` and its scoring ``started`` then, in monotonic seconds.
    """

    job: ScoringJob
    queue: Queue
    execution: Execution
    span: Span
    claimed: float = field(default_factory=time.monotonic)
    started: float = 0.0
    run: Run | None = None
    engine: Engine | None = None
    work: Work | None = None
    forward: Span = INVALID_SPAN

    @property
    def chunk(self) -> int:
        """Number of the chunk."""
        return self.job.chunk[1]


class ModelQueue:
    """Claims whose model would take another's place, put aside so that those of one model are begun together.

    Otherwise models would push each other out job by job.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[WeightsKey, Claim]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, spec: ScoreSpec, claim: Claim) -> None:
        """Put a claim aside that needs the model of `spec`."""
        self._waiting.append((weights_key(spec), claim))

    def take(self, more_to_come: Callable[[], bool]) -> list[Claim]:
        """Those of the model that has waited longest, if they are many or old, or nothing more is to come."""
        if not self._waiting:
            return []
        wanted, oldest = self._waiting[0]
        early = len(self._waiting) < GROUP and time.monotonic() - oldest.claimed < GROUP_SECONDS
        if early and more_to_come():
            return []
        group = [claim for model, claim in self._waiting if model == wanted]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != wanted]
        return group
