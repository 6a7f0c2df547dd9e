"""From a claimed job to work for the engine, and from finished work to the chunk's result."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from jobs.errors import SpecError, WireError
from jobs.job import attempt
from jobs.results import ChunkFailure, ChunkScores, ChunkStats
from jobs.run import Run
from jobs.runs import RunStore
from jobs.wire import decode_pairs
from workers import metrics
from workers.claims import Claim
from workers.engine.cache import EngineCache


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

    def find_run(self, claim: Claim) -> ChunkFailure | None:
        """Read the run of a claimed job: none if it is gone. A fatal failure, if nobody could read it."""
        run_id, chunk = claim.job.chunk
        try:
            claim.run = self._store.load(run_id)
        except WireError as error:
            return ChunkFailure(chunk=chunk, message=str(error), fatal=True)
        return None

    def evicts(self, run: Run) -> bool:
        """Whether to load the run's model means that another has to leave."""
        return self._engines.is_full and not self._engines.fits(run.spec)

    def begin(self, claim: Claim) -> ChunkFailure | None:
        """Fetch, decode and tokenize a chunk: its work, which is none when the run has its scores already.

        Errors of the run as a whole come back as a fatal `ChunkFailure`: they would meet every
        chunk and every retry alike.
        """
        claim.started, run = time.monotonic(), claim.run
        if run is None:
            return None
        try:
            with metrics.stage("fetch"):
                payload = self._store.payload(run, claim.chunk)
                if payload is None:
                    return None
                queries, passages = decode_pairs(payload)
            claim.engine = self._engines.get(run.spec)
        except (WireError, SpecError) as error:
            return ChunkFailure(chunk=claim.chunk, message=str(error), fatal=True)
        if attempt(run, claim.job) > 1:
            metrics.retries.inc()
        with metrics.stage("tokenize"):
            claim.work = claim.engine.prepare(queries, passages)
        return None

    def result(self, claim: Claim) -> ChunkScores:
        """What there is to say of a claim whose work is done."""
        assert claim.run
        assert claim.engine
        assert claim.work
        scored = claim.work.scored
        model = claim.engine.model
        return ChunkScores(
            chunk=claim.chunk,
            scores=pa.array(scored.scores, mask=np.isnan(scored.scores)),
            errors=pa.array([scored.errors.get(row) for row in range(len(scored.scores))], pa.string()),
            stats=ChunkStats(
                worker=self._worker,
                device=model.backend.device,
                backend=model.backend.name,
                precision=model.backend.precision,
                revision=model.revision,
                attempt=attempt(claim.run, claim.job),
                tokens=scored.tokens,
                padded_tokens=scored.padded_tokens,
                batches=scored.batches,
                seconds=time.monotonic() - claim.started,
                int8_gain=model.int8_gain,
            ),
        )
