"""A job that a worker has claimed, and the claims whose model has to wait for its turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from opentelemetry.trace import INVALID_SPAN, Span
from rq import Queue
from rq.executions import Execution

from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.spec import ScoreSpec, WeightsKey, weights_key
from rankmill.workers.queue.rq_job import ScoringJob

if TYPE_CHECKING:
    from rq.worker import SimpleWorker

    from rankmill.jobs.contract.results import ChunkResult
    from rankmill.workers.engine.engine import Engine, Work

GROUP = 8
GROUP_SECONDS = 3.0
"""How many jobs, and for how many seconds, wait before their model is loaded in the place of another."""


Texts = list[str | None]


class Source(Protocol):
    """What a claim is scored for; it raises `WireError` or `InputError` for what cannot be read."""

    in_redis: bool
    """Whether the run is in Redis, with its progress."""

    def load(self) -> Run | None:
        """The run; ``None`` if it is gone."""

    def pairs(self, run: Run) -> tuple[Texts, Texts] | None:
        """Queries and passages, ``[n]`` each; ``None`` if nobody waits for their scores any more."""

    def settle(self, run: Run, mine: Settled) -> Settled:
        """What all chunks of the run are scored with, if this worker has `mine`."""

    def wanted(self, run: Run) -> bool:
        """Whether somebody still waits for the scores."""

    def finish(self, worker: SimpleWorker, claim: Claim, result: ChunkResult | None) -> None:
        """End the job and write its result, if any, in one transaction."""


@dataclass(eq=False)
class Claim:
    """A job that this worker took off its queue and has not finished yet.

    ``source`` and ``run`` are known once the run was read, ``engine`` and ``work`` once the pairs were
    fetched and tokenized. ``claimed`` and ``started`` are monotonic times (s): when the job was claimed,
    and when its scoring began.
    """

    job: ScoringJob
    queue: Queue
    execution: Execution
    span: Span
    claimed: float = field(default_factory=time.monotonic)
    started: float = 0.0
    source: Source | None = None
    run: Run | None = None
    engine: Engine | None = None
    work: Work | None = None
    forward: Span = INVALID_SPAN

    @property
    def chunk(self) -> int:
        """Number of the chunk."""
        return self.job.chunk[1]


class ModelQueue:
    """Claims whose model would evict another, put aside until the claims of one model can begin together.

    Otherwise two models would evict each other job by job. Also claims whose model's files are being read.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[WeightsKey, Claim]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, spec: ScoreSpec, claim: Claim) -> None:
        """Put aside a claim, which needs the model of `spec`."""
        self._waiting.append((weights_key(spec), claim))

    def has_group(self, spec: ScoreSpec) -> bool:
        """Whether as many claims wait for the model of `spec` as shall begin together."""
        return sum(model == weights_key(spec) for model, _ in self._waiting) >= GROUP

    def take(self, more_to_come: Callable[[], bool], reading: Callable[[Run], bool]) -> list[Claim]:
        """The claims of the model that has waited longest, if they are many or old, or no more jobs come.

        Those of models that are `reading` wait on.
        """
        ready = [(model, claim) for model, claim in self._waiting if claim.run and not reading(claim.run)]
        if not ready:
            return []
        wanted, oldest = ready[0]
        early = len(ready) < GROUP and time.monotonic() - oldest.claimed < GROUP_SECONDS
        if early and more_to_come():
            return []
        group = [claim for model, claim in self._waiting if model == wanted]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != wanted]
        return group
