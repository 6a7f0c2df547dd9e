"""From a job's arguments to work for the engine, and from finished work to the chunk's result."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from rq import get_current_job

from jobs.errors import SpecError, WireError
from jobs.results import ChunkFailure, ChunkScores, ChunkStats
from jobs.runs import RunStore, attempt
from jobs.wire import decode_pairs
from workers import metrics
from workers.cache import EngineCache
from workers.engine import Engine, Work


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
