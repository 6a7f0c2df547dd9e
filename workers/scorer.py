"""From a job's arguments to its result: fetch, decode, score, encode."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
from rq import get_current_job

from jobs.errors import SpecError, WireError
from jobs.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats
from jobs.runs import Run, RunStore, attempt
from jobs.wire import decode_pairs
from workers.cache import EngineCache
from workers.engine import Engine, Scored


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

    def __call__(self, run_id: str, chunk: int) -> ChunkResult | None:
        """Score one chunk; ``None`` when the run is gone or the chunk's scores were taken.

        Errors of the run as a whole come back as a fatal `ChunkFailure`: they would meet every
        chunk and every retry alike.
        """
        started = time.monotonic()
        try:
            run = self._store.load(run_id)
            payload = self._store.payload(run, chunk) if run else None
            if run is None or payload is None:
                return None
            queries, passages = decode_pairs(payload)
            engine = self._engines.get(run.spec)
        except (WireError, SpecError) as error:
            return ChunkFailure(chunk, str(error), fatal=True)
        scored = engine.score(queries.to_pylist(), passages.to_pylist())
        return self._result(run, chunk, scored, engine, time.monotonic() - started)

    def _result(self, run: Run, chunk: int, scored: Scored, engine: Engine, seconds: float) -> ChunkScores:
        rows = len(scored.scores)
        backend = engine.model.backend
        return ChunkScores(
            chunk=chunk,
            scores=pa.array(scored.scores, mask=np.isnan(scored.scores)),
            errors=pa.array([scored.errors.get(row) for row in range(rows)], pa.string()),
            stats=ChunkStats(
                worker=self._worker,
                device=backend.device,
                backend=backend.name,
                precision=backend.precision,
                revision=engine.model.revision,
                attempt=attempt(run, get_current_job()),
                tokens=scored.tokens,
                padded_tokens=scored.padded_tokens,
                batches=scored.batches,
                seconds=seconds,
            ),
        )
