"""Reads the pairs of claimed chunks, turns them into work for the engine, and returns their scores."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import redis
from opentelemetry.trace import INVALID_SPAN, Span

from rankmill.jobs.contract.errors import (
    FormatError,
    InputError,
    RankmillError,
    RedisUnavailable,
    RunFailed,
    SpecError,
    ValueRefused,
    WireError,
    WorkerError,
)
from rankmill.jobs.contract.job import asks_for_row_tokens, attempt
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.priority import Priority, priority_of
from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats, used_by
from rankmill.jobs.contract.run import Run, Settled, settled_by
from rankmill.jobs.contract.spec import ScoreSpec, in_precision, weights_key
from rankmill.jobs.contract.wire import as_arrow, decode_rows
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.pairs_job import read_pairs, read_request, return_value, survives
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost, OutOfMemory
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.work import Texts, Work, encode, prepare
from rankmill.workers.host import metrics
from rankmill.workers.host.device import device_name
from rankmill.workers.models.sources import Reading
from rankmill.workers.queue.claim_order import Refusals
from rankmill.workers.rq.job import HeldJob, JobReplaced, ScoringJob
from rankmill.workers.rq.worker import JobTimeout, RQWorker, TooLong

_RUNS = 1000

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ChunkClaim:
    """A chunk whose job this worker took off its queue and has not finished yet.

    Attributes
    ----------
    run
        The run; ``None`` before it is read.
    engine, work
        The engine that scores the chunk, and the chunk's work; ``None`` before the chunk is tokenized.
    fast
        Whether a fast tokenizer library may have tokenized the chunk.
    claimed, started
        Monotonic times in seconds at which the job was claimed, and at which its scoring began. The time for
        loading the model is added to ``started``, so that it does not count.
    """

    in_redis: ClassVar[bool] = True
    """Whether the chunk's run is stored in Redis; false for a job that contains its pairs."""

    held: HeldJob
    span: Span
    store: RunStore
    claimed: float = field(default_factory=system.monotonic)
    started: float = 0.0
    run: Run | None = None
    engine: Engine | None = None
    work: Work | None = None
    fast: bool = False
    forward: Span = INVALID_SPAN
    _payload: bytes | None = None

    @property
    def job(self) -> ScoringJob:
        return self.held.job

    @property
    def queue(self) -> OrderedQueue:
        return self.held.queue

    @property
    def run_id(self) -> str:
        """The id of the run whose chunk this is; raises as `ScoringJob.chunk`."""
        return self.job.chunk[0]

    @property
    def chunk(self) -> ChunkId:
        """The chunk's id within its run; raises as `ScoringJob.chunk`."""
        return self.job.chunk[1]

    @property
    def priority(self) -> Priority:
        return priority_of(self.run_id)

    def load(self) -> Run | None:
        """Read the chunk's run from Redis, and for a request also its few pairs. Returns ``None`` if the run
        is gone.

        Raises
        ------
        WireError, InputError
            The run cannot be read.
        """
        if self.priority == "request":
            self.run, self._payload = self.store.load_with(self.run_id, self.chunk)
        else:
            self.run = self.store.load(self.run_id)
        return self.run

    def columns(self, run: Run) -> Sequence[Texts] | None:
        """Read the chunk's rows as columns ``[n]``, such as queries and passages.

        Returns ``None`` if no producer waits for the scores any more.

        Raises
        ------
        WireError
            The rows cannot be read.
        """
        payload, self._payload = self._payload, None
        if self.priority == "bulk":
            payload = self.store.payload(run, self.chunk)
        return None if payload is None else decode_rows(payload, run.inputs)

    def settle(self, run: Run, rows: int, mine: Settled) -> Settled:
        """Agree with other workers on the precision and the model content with which a run is scored, and
        return what was agreed.

        The run's first worker decides for all. For a request of one chunk, `mine` is returned without asking
        Redis.

        Parameters
        ----------
        run
            The run.
        rows
            Number of the chunk's rows.
        mine
            The precision and the model's content that this worker would use.
        """
        if self.priority == "request" and (self.chunk, rows) == (0, run.rows):
            return mine
        return self.store.settle(run, mine)

    def is_wanted(self) -> bool:
        return self.store.exists(self.run_id)

    def finish(self, result: ChunkResult | None) -> None:
        """End the job and write its result, if it has one, in one transaction.

        If the result is too large for a payload or for the server, a failure of the run is written instead.
        """

        def write(pipe: redis.client.Pipeline) -> None:
            if result is not None:
                self.store.add_result(pipe, self.run_id, result, self.job.run_ttl)

        try:
            self.held.finish(write)
        except (ValueRefused, WireError) as error:
            way_out = ": set a smaller chunk_size (--chunk-size)" if isinstance(error, WireError) else ""
            logger.warning("the run cannot be scored: %s%s", error, way_out)
            result = ChunkFailure(chunk=self.chunk, message=f"{error}{way_out}", fatal=True)
            self.held.finish(write)

    def fail(self, error: Exception) -> None:
        self.held.fail(error)


class PairsClaim(ChunkClaim):
    """A job that contains its pairs; it ends as RQ's own jobs do, with RQ's result."""

    in_redis = False
    _texts: tuple[Texts, Texts] | None = None

    def load(self) -> Run | None:
        self._texts = read_pairs(self.job)  # here, so that bad texts are refused before a model is loaded
        self.run = read_request(self.job)
        return self.run

    def columns(self, run: Run) -> Sequence[Texts] | None:
        return self._texts

    def settle(self, run: Run, rows: int, mine: Settled) -> Settled:
        return mine

    def is_wanted(self) -> bool:
        return self.held.is_wanted()

    def finish(self, result: ChunkResult | None) -> None:
        """End the job with its result through RQ, which also starts jobs that depend on it.

        Without a result, this worker only gives up its claim on the job.
        """
        try:
            if isinstance(result, ChunkScores):
                self._succeed(result)
            elif result is not None:
                self.fail(RunFailed(result.message))
            else:
                self.held.drop()
        except Exception as error:
            if isinstance(error, RedisUnavailable) or cannot_serve(error):
                raise
            raise DamagedJob(f"RQ cannot end it ({type(error).__name__}: {error})") from None

    def _succeed(self, result: ChunkScores) -> None:
        assert self.run
        self.store.count_request(self.run, (self.job.created_at, self.job.repeats_left), used_by(result))
        try:
            self.held.succeed(return_value(result))
        except JobReplaced as error:
            if self.is_wanted():
                self.fail(error)
            else:
                self.held.drop()

    def fail(self, error: Exception) -> None:
        """Record a failed attempt. An error that rankmill explains is final, because another attempt would
        fail too.
        """
        if not self.held.asks_the_same():  # another attempt would overwrite other work with this id
            error = InputError(
                f"job {self.job.id} was enqueued again with other pairs or options while a worker scored it: "
                "give each job an id of its own"
            )
        if isinstance(error, RankmillError):
            self.job.retries_left = 0
        elif isinstance(error, DeviceLost):  # the worker ends, and the job may run again
            survives(self.job)
        if self.job.should_retry:
            self.held.fail(error)
        else:
            self.held.fail_for_good(error)


class WrongTokens(Exception):
    """A fast tokenizer library has given wrong ids; no tokens of this library may be scored."""


class ChunkScorer:
    """Scores chunks of any run with this process's models.

    After an error, its `Fault` decides what happens to the chunk. Only after `WrongTokens`, the worker hands
    back all chunks and stops.

    Parameters
    ----------
    worker
        The RQ worker.
    engines
        The process's loaded models.
    pinned
        Replaces a model's name in a spec by the model for which the name stands now.
    reading
        Reads the files of models that are not loaded.
    refusals
        The models and runs that this worker refuses now.
    pipeline
        Scores the tokenized chunks, several together.
    """

    def __init__(
        self,
        worker: RQWorker,
        engines: EngineCache,
        pinned: Callable[[ScoreSpec], ScoreSpec],
        reading: Reading,
        refusals: Refusals,
        pipeline: Pipeline,
    ) -> None:
        self._worker = worker
        self._engines = engines
        self._pinned = pinned
        self._reading = reading
        self._refusals = refusals
        self._pipeline = pipeline
        self._settled: OrderedDict[str, ScoreSpec] = OrderedDict()

    def find_run(self, claim: ChunkClaim) -> None:
        """Read the run of a claim into ``claim.run``, which stays ``None`` if the run is gone.

        Raises
        ------
        RunFailed
            The run is damaged.
        SpecError, FormatError
            The run has another format, this worker refuses the run now, or it cannot resolve the name of the
            run's model.
        InputError, ForeignJobError
            The job asks for something that is not possible.
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
        if not claim.in_redis:  # no producer has resolved the model's name
            try:
                claim.run = run = run.model_copy(update={"spec": self._pinned(run.spec)})
            except WorkerError as error:
                # A `WorkerError` would refuse all runs of a model, but it is not known which model the name
                # means.
                raise SpecError(str(error)) from None
        self._refusals.check(weights_key(self.spec(run)))

    def reads(self, run: Run) -> bool:
        """Return whether a thread is still reading the model's files, so that the model cannot be loaded yet.

        The first call starts this thread.
        """
        spec = self.spec(run)
        return not self._engines.has(spec) and self._reading.goes_on(spec)

    def evicts(self, run: Run) -> bool:
        return self._engines.evicts(self.spec(run))

    def begin(self, claim: ChunkClaim, answer: Callable[[], None], *, whole: bool) -> None:
        """Fetch and tokenize a chunk, and put it into the pipeline, which calls `answer` when the chunk is
        scored.

        If no producer waits for the scores any more, nothing is put into the pipeline. For `whole`, see
        `Pipeline.put`.

        Raises
        ------
        SpecError, FormatError
            This worker cannot score the chunk, but another may, because it has other files and packages.
        DamagedJob
            The payload is damaged; the producer can submit it again.
        WrongTokens
            The tokenizer library that may have tokenized the chunk has given wrong tokens.
        JobTimeout
            Fetching and tokenizing take too long.
        DeviceLost
            The device was lost while the model was loaded.
        """
        job = claim.job
        try:
            with self._worker.limit(job.begin_seconds):
                self._fetch(claim)
        except TooLong:
            raise JobTimeout(f"not tokenized after {job.begin_seconds} s") from None
        if claim.engine is None or claim.work is None:
            return
        texts = claim.engine.model.texts
        with claim.engine.model.lock:
            wrong = texts.news() if texts else None
        if texts and wrong:
            raise WrongTokens(f"wrong tokens of {claim.engine.model.name} ({wrong})")
        rows = len(claim.work.scored.scores)
        logger.debug("claimed %d rows", rows)
        claim.forward = tracing.begin("forward", claim.span, rows=rows)
        self._pipeline.put(claim.engine, claim.work, answer, claim.priority, whole=whole)

    def _fetch(self, claim: ChunkClaim) -> None:
        """Fetch and tokenize a chunk into ``claim.engine`` and ``claim.work``, if its scores are wanted."""
        claim.started, run = system.monotonic(), claim.run
        if run is None:
            return
        try:
            with metrics.stage("fetch"):
                columns = claim.columns(run)
        except FormatError:
            raise
        except WireError as error:
            raise DamagedJob(str(error)) from None
        if columns is None:
            return
        load_began = system.monotonic()
        try:
            engine = self._engine(claim, run, rows=len(columns[0]))
        except (MemoryError, OutOfMemory):
            raise WorkerError(f"there is not enough memory to load model {run.spec.model}") from None
        except WireError as error:
            raise SpecError(str(error)) from None
        claim.started += system.monotonic() - load_began
        if attempt(run, claim.job) > 1:
            metrics.retries.inc()
        with metrics.stage("tokenize"):
            began = system.monotonic()
            claim.fast = engine.model.texts is not None and engine.model.texts.is_fast
            claim.engine = engine
            claim.work = (encode if run.inputs == "tokens" else prepare)(engine.model, *columns)
            claim.work.seconds["tokenize"] = system.monotonic() - began

    def spec(self, run: Run) -> ScoreSpec:
        """Return the run's spec. If this worker knows the precision and the revision on which the run's
        workers have agreed, the spec names them.
        """
        return self._settled.get(run.id, run.spec)

    def _engine(self, claim: ChunkClaim, run: Run, rows: int) -> Engine:
        """Return the engine that scores a run, with the precision and model content on which the run's
        workers agreed.

        This worker remembers the agreement. When a chunk is tried again, this worker asks Redis again,
        because the agreement may have changed.
        """
        if attempt(run, claim.job) > 1:
            self._settled.pop(run.id, None)
        spec = self.spec(run)
        engine = self._engines.get(spec)
        if run.id in self._settled:
            return engine
        model = engine.model
        mine = settled_by(spec, model.backend.precision, model.revision, model.kind)
        settled = claim.settle(run, rows, mine)
        if settled.precision and settled.precision != mine.precision:
            spec = in_precision(spec, settled.precision)
        if settled.revision:
            spec = spec.model_copy(update={"revision": settled.revision})
        if settled != mine:
            try:
                engine = self._engines.get(spec)
            except WorkerError as error:
                # A `WorkerError` would refuse all runs of the model, but this host may well score others.
                raise SpecError(str(error)) from None
            own = engine.model.backend.precision
            if settled.precision not in {None, own}:
                raise SpecError(f"the run is scored in {settled.precision}, and this worker has {own}")
        if settled.kind != engine.model.kind:
            raise SpecError(
                f"the run is deterministic, and its bits are those of {settled.kind}; this worker's would be "
                f"those of {engine.model.kind}"
            )
        if claim.in_redis:  # a job of pairs is not remembered: a later one may have its id and another spec
            self._settled[run.id] = spec
        if len(self._settled) > _RUNS:
            self._settled.popitem(last=False)
        return engine

    def result(self, claim: ChunkClaim) -> ChunkScores:
        assert claim.run
        assert claim.engine
        assert claim.work
        scored = claim.work.scored
        model = claim.engine.model
        seconds, proof = claim.work.seconds, model.proof
        missing = np.isnan(scored.scores if scored.scores.ndim == 1 else scored.scores[:, 0])
        scores, tokens = as_arrow(scored.scores, missing), None
        errors = np.full(len(scored.scores), None)
        errors[list(scored.errors)] = list(scored.errors.values())
        if claim.work.found is not None:
            tokens = pa.array(claim.work.found, pa.string())
        elif asks_for_row_tokens(claim.job):
            tokens = pa.array(claim.work.row_tokens, mask=missing)
        return ChunkScores(
            chunk=claim.chunk,
            scores=scores,
            errors=pa.array(errors, pa.string()),
            stats=ChunkStats(
                worker=self._worker.name,
                device=model.backend.device,
                device_name=device_name(model.backend.device),
                backend=model.backend.name,
                precision=model.backend.precision,
                revision=model.revision,
                attempt=attempt(claim.run, claim.job),
                tokens=scored.tokens,
                padded_tokens=scored.padded_tokens,
                batches=scored.batches,
                seconds=system.monotonic() - claim.started,
                tokenize_seconds=seconds.get("tokenize", 0.0),
                forward_seconds=seconds.get("forward", 0.0),
                device_seconds=seconds.get("device", 0.0),
                int8_gain=model.int8_gain,
                windows=scored.windows,
                labels=model.labels,
                bound=proof.bound if proof else None,
                reference="own" if proof and proof.reference == "own" else None,
                kind=model.kind,
            ),
            tokens=tokens,
        )
