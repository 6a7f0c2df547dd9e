"""Turns a claimed job into work for the engine, and finished work into the chunk's result."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
import pyarrow as pa

from rankmill.jobs.contract.errors import FormatError, RunFailed, SpecError, WireError, WorkerError
from rankmill.jobs.contract.job import asks_for_times, attempt
from rankmill.jobs.contract.results import ChunkScores, ChunkStats
from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.spec import ScoreSpec, settled, weights_key
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.workers.backends.base import DeviceLost, Logits, OutOfMemory
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host import metrics
from rankmill.workers.models.reading import Reading
from rankmill.workers.models.versions.aliases import Aliases
from rankmill.workers.queue.claim import ChunkClaim
from rankmill.workers.queue.refusals import Refusals

_RUNS = 1000
"""Runs of which a worker remembers what is settled."""


class ChunkScorer:
    """Scores chunks of any run with the models of this process.

    The `Fault` of the errors that it raises says what is to become of the chunk.

    Parameters
    ----------
    worker
        Name of the RQ worker, for the record.
    engines
        The process's loaded models.
    aliases
        Finds out which versions aliases stand for.
    reading
        Reads the files of models that are not loaded.
    refusals
        The models and runs that this worker does not try just now.
    """

    def __init__(
        self, worker: str, engines: EngineCache, aliases: Aliases, reading: Reading, refusals: Refusals
    ) -> None:
        self._worker = worker
        self._engines = engines
        self._aliases = aliases
        self._reading = reading
        self._refusals = refusals
        self._settled: OrderedDict[str, ScoreSpec] = OrderedDict()

    def find_run(self, claim: ChunkClaim) -> None:
        """Read the run of a claim; it stays without one if that is gone.

        Raises
        ------
        RunFailed
            The run is damaged.
        SpecError, FormatError
            This worker cannot score it: another release wrote it, or the worker refuses it now.
        InputError
            The job asks for what cannot be.
        """
        self._refusals.check(("run", claim.run_id))
        try:
            run = claim.load()
        except FormatError:
            raise
        except WireError as error:
            raise RunFailed(str(error)) from None
        if run is None:
            return
        if not claim.in_redis:  # no producer has begun it, and found the version that its model stands for
            try:
                claim.run = run = run.model_copy(update={"spec": self._aliases.pinned(run.spec)})
            except WorkerError as error:
                raise SpecError(str(error)) from None  # no fault of the model, which nobody knows yet
        self._refusals.check(weights_key(self.spec(run)))

    def reads(self, run: Run) -> bool:
        """Whether the files of the run's model are being read, before it is loaded; begins that."""
        spec = self.spec(run)
        return not self._engines.has(spec) and self._reading.goes_on(spec)

    def evicts(self, run: Run) -> bool:
        """Whether loading the run's model would evict another model."""
        return self._engines.evicts(self.spec(run))

    def begin(self, claim: ChunkClaim) -> None:
        """Fetch, decode and tokenize a chunk; the claim gets no work if the run has the scores already.

        Raises
        ------
        SpecError, FormatError
            This worker cannot score the chunk, but another may: whatever it finds wrong with the model is
            found in its files, by its packages.
        DamagedJob
            The payload is damaged; the producer can submit it again.
        """
        claim.started, run = time.monotonic(), claim.run
        if run is None:
            return
        try:
            with metrics.stage("fetch"):
                pairs = claim.pairs(run)
        except FormatError:
            raise
        except WireError as error:
            raise DamagedJob(str(error)) from None
        if pairs is None:
            return
        try:
            engine = self._engine(claim, run, rows=len(pairs[0]))
        except (MemoryError, OutOfMemory):
            raise WorkerError(f"there is not enough memory to load model {run.spec.model}") from None
        except DeviceLost as error:
            raise WorkerError(str(error)) from None
        except WireError as error:
            raise SpecError(str(error)) from None
        if attempt(run, claim.job) > 1:
            metrics.retries.inc()
        with metrics.stage("tokenize"):
            began = time.monotonic()
            claim.engine, claim.work = engine, engine.prepare(*pairs)
            claim.work.seconds["tokenize"] = time.monotonic() - began

    def spec(self, run: Run) -> ScoreSpec:
        """The run's spec, with its settled precision and revision if this worker knows them."""
        return self._settled.get(run.id, run.spec)

    def _engine(self, claim: ChunkClaim, run: Run, rows: int) -> Engine:
        """The engine of a run, in the precision and with the content that all its chunks are scored with.

        The first worker to get here settles them for the whole run.
        """
        spec = self.spec(run)
        engine = self._engines.get(spec)
        if run.id in self._settled:
            return engine
        is_auto = spec.precision == "auto"
        mine = Settled(engine.model.backend.precision if is_auto else None, engine.model.revision)
        found = claim.settle(run, rows, mine)
        if found.precision and found.precision != mine.precision:
            spec = settled(spec, found.precision)
        if found.revision:
            spec = spec.model_copy(update={"revision": found.revision})
        self._settled[run.id] = spec
        if len(self._settled) > _RUNS:
            self._settled.popitem(last=False)
        return engine if found == mine else self._engines.get(spec)

    def result(self, claim: ChunkClaim) -> ChunkScores:
        """The result of a claim whose work is done."""
        assert claim.run
        assert claim.engine
        assert claim.work
        scored = claim.work.scored
        model = claim.engine.model
        times = claim.work.seconds if asks_for_times(claim.job) else {}
        return ChunkScores(
            chunk=claim.chunk,
            scores=_as_arrow(scored.scores),
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
                windows=scored.windows,
                labels=model.labels,
                tokenize_seconds=times.get("tokenize"),
                forward_seconds=times.get("forward"),
            ),
        )


def _as_arrow(scores: Logits) -> pa.Array:
    """Scores ``[n]``, or of labels ``[n, labels]`` as lists; NaN becomes null."""
    if scores.ndim == 1:
        return pa.array(scores, mask=np.isnan(scores))
    missing = pa.array(np.isnan(scores[:, 0]))
    return pa.FixedSizeListArray.from_arrays(pa.array(scores.ravel()), scores.shape[1], mask=missing)
