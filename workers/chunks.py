"""From a job's arguments to work for the engine, and from finished work to the chunk's result."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from rq import get_current_job
from rq.job import Job

from jobs.errors import SpecError, WireError
from jobs.job import attempt
from jobs.results import ChunkFailure, ChunkScores, ChunkStats
from jobs.runs import RunStore
from jobs.spec import ScoreSpec
from jobs.wire import decode_pairs
from workers import metrics
from workers.engine.cache import EngineCache
from workers.engine.engine import Engine, Work


@dataclass(frozen=True)
class ClaimedChunk:
    """A chunk that was fetched and tokenized."""

    chunk: int
    attempt: int
    engine: Engine
    work: Work
    started: float


class ChunkScorer:
    """Scores chunks of any run with the models of this process.

    Parameters
    ----------
    store
        Where runs live.
    engines
        The process's loaded models.
    worker
        Name of the RQ worker, for the record.
    """

    def __init__(self, store: RunStore, engines: EngineCache, worker: str) -> None:
        self._store = store
        self._engines = engines
        self._worker = worker

    def evicting_spec(self, job: Job) -> ScoreSpec | None:
        """The spec of a job's run, if to load its model means that another has to leave."""
        if not self._engines.is_full:
            return None
        run = self._store.load(str(job.args[0]))
        return None if run is None or self._engines.fits(run.spec) else run.spec

    def claim(self, run_id: str, chunk: int) -> ClaimedChunk | ChunkFailure | None:
        """Fetch, decode and tokenize a chunk; ``None`` when the run is gone or has its scores.

        Errors of the run as a whole come back as a fatal `ChunkFailure`: they would meet every
        chunk and every retry alike.
        """
        started = time.monotonic()
        try:
            with metrics.stage("fetch"):
                run = self._store.load(run_id)
                payload = self._store.payload(run, chunk) if run else None
                if run is None or payload is None:
                    return None
                queries, passages = decode_pairs(payload)
            engine = self._engines.get(run.spec)
        except (WireError, SpecError) as error:
            return ChunkFailure(chunk, str(error), fatal=True)
        attempts = attempt(run, get_current_job())
        if attempts > 1:
            metrics.retries.inc()
        with metrics.stage("tokenize"):
            work = engine.prepare(queries, passages)
        return ClaimedChunk(chunk, attempts, engine, work, started)

    def result(self, claimed: ClaimedChunk) -> ChunkScores:
        """What there is to say of a chunk whose work is done."""
        scored = claimed.work.scored
        model = claimed.engine.model
        return ChunkScores(
            chunk=claimed.chunk,
            scores=pa.array(scored.scores, mask=np.isnan(scored.scores)),
            errors=pa.array([scored.errors.get(row) for row in range(len(scored.scores))], pa.string()),
            stats=ChunkStats(
                worker=self._worker,
                device=model.backend.device,
                backend=model.backend.name,
                precision=model.backend.precision,
                revision=model.revision,
                attempt=claimed.attempt,
                tokens=scored.tokens,
                padded_tokens=scored.padded_tokens,
                batches=scored.batches,
                seconds=time.monotonic() - claimed.started,
            ),
        )
