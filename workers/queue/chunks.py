"""Turns a claimed job into work for the engine, and finished work into the chunk's result."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
import pyarrow as pa

from rankmill.jobs.contract.errors import FormatError, SpecError, WireError, WorkerError
from rankmill.jobs.contract.job import asks_for_times, attempt
from rankmill.jobs.contract.results import ChunkFailure, ChunkScores, ChunkStats
from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.spec import ScoreSpec, settled, weights_key
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.workers.backends.base import DeviceLost, Logits, OutOfMemory
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host import metrics
from rankmill.workers.models.sources import Reading
from rankmill.workers.models.versions import Aliases
from rankmill.workers.queue.claim import Claim, Source
from rankmill.workers.queue.refusals import Refusals, RefusedRuns
from rankmill.workers.queue.sources import source_of

logger = logging.getLogger(__name__)

_RUNS = 1000
"""Runs of which a worker remembers what is settled."""


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
    aliases
        Finds out which versions aliases stand for.
    reading
        Reads the files of models that are not loaded.
    """

    def __init__(
        self, store: RunStore, engines: EngineCache, worker: str, aliases: Aliases, reading: Reading
    ) -> None:
        self._aliases = aliases
        self._reading = reading
        self._store = store
        self._engines = engines
        self._worker = worker
        self._settled: OrderedDict[str, ScoreSpec] = OrderedDict()
        self.refusals = Refusals()
        self.refused_runs = RefusedRuns(store, worker, self.refusals)

    def find_run(self, claim: Claim) -> ChunkFailure | None:
        """Read the run of a claimed job, ``None`` if it is gone; return a fatal failure if it is damaged.

        Raises
        ------
        WorkerError
            This worker cannot score the chunk: another release wrote the run, or the worker refuses it now.
        """
        claim.source = source_of(claim.job, self._store)
        run_id, chunk = claim.job.chunk
        self._check(("run", run_id))
        try:
            claim.run = claim.source.load()
        except FormatError as error:
            raise self._refusal(("run", run_id), error) from None
        except WireError as error:
            return ChunkFailure(chunk=chunk, message=str(error), fatal=True)
        if claim.run and not claim.source.in_redis:
            claim.run = self._with_version(claim.run)
        if claim.run:
            self._check(weights_key(self._spec(claim.run)))
        return None

    def _with_version(self, run: Run) -> Run:
        """A run that no producer began, with the version that its model stands for."""
        try:
            return run.model_copy(update={"spec": self._aliases.pinned(run.spec)})
        except WorkerError as error:
            raise self._refusal(("run", run.id), error) from None

    def reads(self, run: Run) -> bool:
        """Whether the files of the run's model are being read, before it is loaded; begins that."""
        spec = self._spec(run)
        return not self._engines.has(spec) and self._reading.goes_on(spec)

    def evicts(self, run: Run) -> bool:
        """Whether loading the run's model would evict another model."""
        return self._engines.is_full and not self._engines.fits(self._spec(run))

    def begin(self, claim: Claim) -> None:
        """Fetch, decode and tokenize a chunk; the claim gets no work if the run has the scores already.

        Raises
        ------
        WorkerError
            This worker cannot score the chunk, but another may: whatever it finds wrong with the model is
            found in its files, by its packages. `RefusedRuns` ends the run when all live workers say so.
        DamagedJob
            The payload is damaged; the producer can submit it again.
        """
        claim.started, run, source = time.monotonic(), claim.run, claim.source
        if run is None or source is None:
            return
        try:
            with metrics.stage("fetch"):
                pairs = source.pairs(run)
                if pairs is None:
                    return
        except FormatError as error:
            raise self._refusal(("run", run.id), error) from None
        except WireError as error:
            raise DamagedJob(str(error)) from None
        try:
            claim.engine = self._engine(run, source)
        except (MemoryError, OutOfMemory):
            trouble = WorkerError(f"there is not enough memory to load model {run.spec.model}")
            raise self._refusal(weights_key(self._spec(run)), trouble) from None
        except (SpecError, WireError, DeviceLost) as error:
            key = weights_key(self._spec(run)) if _is_of_the_host(error) else ("run", run.id)
            raise self._refusal(key, error) from None
        self._accept(run)
        if attempt(run, claim.job) > 1:
            metrics.retries.inc()
        with metrics.stage("tokenize"):
            began = time.monotonic()
            claim.work = claim.engine.prepare(*pairs)
            claim.work.seconds["tokenize"] = time.monotonic() - began

    def _check(self, key: Hashable) -> None:
        reason = self.refusals.why(key)
        if reason is not None:
            raise WorkerError(reason)

    def _refusal(self, key: Hashable, error: Exception) -> WorkerError:
        """Refuse `key` for a while, because of `error`."""
        if self.refusals.open(key, str(error)):
            logger.warning("left to other workers: %s", error)
        return WorkerError(str(error))

    def _accept(self, run: Run) -> None:
        """Withdraw earlier refusals: this worker can score the run."""
        self.refusals.close(weights_key(run.spec))
        self.refusals.close(weights_key(self._spec(run)))
        self.refusals.close(("run", run.id))
        self.refused_runs.take_back(run.id)

    def _spec(self, run: Run) -> ScoreSpec:
        """The run's spec, with its settled precision and revision if this worker knows them."""
        return self._settled.get(run.id, run.spec)

    def _engine(self, run: Run, source: Source) -> Engine:
        """The engine of a run, in the precision and with the content that all its chunks are scored with.

        The first worker to get here settles them for the whole run.
        """
        spec = self._spec(run)
        engine = self._engines.get(spec)
        if run.id in self._settled:
            return engine
        is_auto = spec.precision == "auto"
        mine = Settled(engine.model.backend.precision if is_auto else None, engine.model.revision)
        found = source.settle(run, mine)
        if found.precision and found.precision != mine.precision:
            spec = settled(spec, found.precision)
        if found.revision:
            spec = spec.model_copy(update={"revision": found.revision})
        self._settled[run.id] = spec
        if len(self._settled) > _RUNS:
            self._settled.popitem(last=False)
        return engine if found == mine else self._engines.get(spec)

    def result(self, claim: Claim) -> ChunkScores:
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


def _is_of_the_host(error: Exception) -> bool:
    """Whether any run with this model would fail alike here for a while: no directory, hub, package, memory.

    What else is wrong with the model may be mended before the next run, or no trouble for its options.
    """
    lasting = (OSError, ImportError, MemoryError)
    return isinstance(error, WorkerError | DeviceLost) or isinstance(error.__cause__, lasting)
