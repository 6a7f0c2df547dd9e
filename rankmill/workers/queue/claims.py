"""Begins and ends a worker's claimed jobs, and decides what happens to a job after an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import redis

from rankmill.jobs.contract.errors import Fault, RunFailed, SpecError, WorkerError, fault_of
from rankmill.jobs.contract.job import is_suspect
from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.spec import ScoreSpec, WeightsKey, weights_key
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.refusals import RunRefusals
from rankmill.jobs.protocol.set_aside import DamagedJob, set_aside
from rankmill.jobs.protocol.worker_report import LastReport
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.logs import about_job
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.host import metrics
from rankmill.workers.models.loading import Model
from rankmill.workers.queue.chunks import ChunkClaim, ChunkScorer, PairsClaim, WrongTokens
from rankmill.workers.queue.claim_order import ClaimOrder, Refusals, StillRefused
from rankmill.workers.rq.job import ScoringJob
from rankmill.workers.rq.worker import RQWorker

GROUP = 8
GROUP_SECONDS = 3.0
"""Chunks that wait for another model begin in three cases: `GROUP` of them are ready, the oldest has waited
`GROUP_SECONDS`, or no job waits in the queues.
"""

_NAMED = 100
"""A worker that stops because of wrong scores names at most this many runs in its last report."""

_REMEMBERED = 100_000
"""A worker remembers at most this many runs: those that it has scored last. If its scores turn out to be
wrong, it leaves a note in Redis for each of these runs.
"""

logger = logging.getLogger(__name__)


class ModelQueue:
    """Holds claimed chunks until their model can be loaded.

    A chunk waits if loading its model would unload another model, or if a thread is still reading the files
    of its model. Chunks of one model begin together, so that two models do not unload each other for every
    chunk.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[WeightsKey, ChunkClaim]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, spec: ScoreSpec, claim: ChunkClaim) -> None:
        self._waiting.append((weights_key(spec), claim))

    def has_group(self, spec: ScoreSpec) -> bool:
        return sum(model == weights_key(spec) for model, _ in self._waiting) >= GROUP

    def empty(self) -> list[ChunkClaim]:
        claims = [claim for _, claim in self._waiting]
        self._waiting = []
        return claims

    def take(self, more_to_come: Callable[[], bool], reading: Callable[[Run], bool]) -> list[ChunkClaim]:
        """Remove and return all claims of one model: the model of the oldest ready claim.

        A claim is ready when the files of its model have been read. The result is empty in two cases:

        - No claim is ready.
        - More jobs wait in the queues, fewer than `GROUP` claims are ready, and the oldest ready claim has
          waited less than `GROUP_SECONDS`.

        Parameters
        ----------
        more_to_come
            Returns whether more jobs wait in the queues.
        reading
            Returns whether the files of a run's model are still being read.
        """
        ready = [(model, claim) for model, claim in self._waiting if claim.run and not reading(claim.run)]
        if not ready:
            return []
        wanted, oldest = ready[0]
        early = len(ready) < GROUP and system.monotonic() - oldest.claimed < GROUP_SECONDS
        if early and more_to_come():
            return []
        group = [claim for model, claim in self._waiting if model == wanted]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != wanted]
        return group


@dataclass
class Answered:
    """The runs for which a worker has written scores.

    ``runs`` has the expiry of each run in seconds, the latest run last. The expiry is 0 if the run is not in
    Redis. ``since`` is the time of the first scores, in seconds since 1970.
    """

    since: float = field(default_factory=system.now)
    runs: dict[str, int] = field(default_factory=dict)

    def add(self, run: str, ttl: int) -> None:
        self.runs.pop(run, None)
        self.runs[run] = ttl
        if len(self.runs) > _REMEMBERED:
            del self.runs[next(iter(self.runs))]


def loaded_as(model: Model) -> tuple[object, ...]:
    """The key of a loaded model, which may be loaded in several precisions and revisions."""
    return model.name, model.revision, model.backend.name, model.backend.precision, model.kind


class Claims:
    """Begins the jobs that a worker has claimed, and answers each of them exactly once.

    An answer is one of these:

    - The job ends, mostly with a result.
    - A failed attempt is recorded.
    - The job is handed back.
    - The job is set aside, because its keys are damaged.

    Parameters
    ----------
    worker
        The RQ worker that claims the jobs.
    scorer, pipeline
        The scorer turns a chunk into work, and puts the work into the pipeline.
    order
        Chooses which jobs to claim next, and is told which chunks were begun or handed back.
    refusals
        The models and runs that this worker refuses now.
    """

    def __init__(
        self, worker: RQWorker, scorer: ChunkScorer, pipeline: Pipeline, order: ClaimOrder, refusals: Refusals
    ) -> None:
        self._worker = worker
        self._store = store = worker.store
        self._scorer = scorer
        self._pipeline = pipeline
        self._order = order
        self._refusals = refusals
        self._run_refusals = RunRefusals(store.redis, worker.name, worker.lease_seconds)
        self._put_aside = ModelQueue()
        self._unproven: dict[tuple[object, ...], Answered] = {}
        """For each loaded model, the runs that were scored with it since its probes (pairs with known scores)
        last had the right scores.
        """
        self._fast = Answered()
        """The runs with scored chunks that a fast tokenizer library may have tokenized. If the library turns
        out to give wrong tokens, these runs may have wrong scores.
        """
        self._lock = system.Lock()
        self.unanswered: dict[str, ChunkClaim] = {}
        """The claims that are not answered yet, by job id. Other threads may read only a copy."""
        self.wrong: LastReport | None = None
        """Why the worker stops, if it has computed wrong scores, or else ``None``."""
        pipeline.proven = self._proven
        pipeline.changed = self._stop_wrong_device
        metrics.claimed_jobs.set_function(lambda: len(self.unanswered))
        metrics.claimed_pairs.set_function(lambda: pipeline.pending)
        metrics.refusals.set_function(lambda: len(refusals.reasons()))

    @property
    def waiting(self) -> bool:
        return bool(self._put_aside)

    def engines(self) -> set[Engine | None]:
        """The engines that score the claimed chunks."""
        return {claim.engine for claim in list(self.unanswered.values())}

    def take(self, job: ScoringJob, queue: OrderedQueue) -> None:
        """Claim a job and let its chunk be scored.

        A job whose model would unload another model waits in the `ModelQueue`. A suspect job, which may kill
        its worker, is scored by itself, so that it is not blamed for a row of another chunk.
        """
        with self._set_aside_if_damaged(job, queue):
            if suspect := is_suspect(job):
                self._pipeline.drain()
            held = self._worker.claim(job, queue)
            if held is None:
                return  # another worker has the job
            span = tracing.begin_for(job, worker=self._worker.name)
            kind = PairsClaim if job.has_pairs else ChunkClaim
            claim = self.unanswered[job.id] = kind(held, span, self._store)
            with about_job(job.id), tracing.within(claim.span):
                self._claim(claim, put_aside=not suspect)
                if suspect:
                    self._pipeline.drain()

    def begin_put_aside(self) -> None:
        """Begin to score chunks that wait in the `ModelQueue`, if the chunks of a model may begin now."""
        for claim in self._put_aside.take(self._more_to_come, self._scorer.reads):
            with (
                about_job(claim.job.id),
                tracing.within(claim.span),
                self._set_aside_if_damaged(claim.job, claim.queue),
            ):
                # find the run again, because an earlier chunk may have made the worker refuse the model
                self._claim(claim, put_aside=False)

    def _more_to_come(self) -> bool:
        return any(queue.count for queue in self._worker.queues)

    def drop_cancelled(self) -> None:
        """Stop scoring chunks of runs that are no longer in Redis, because they were cancelled or lost.

        The jobs end without a result and without a failure, because the producer of a lost run submits the
        run again.
        """
        for claim in list(self.unanswered.values()):
            if claim.work and not claim.is_wanted():
                self._pipeline.drop(claim.work, partial(self._answer, claim, None))

    def unstarted(self) -> list[ChunkClaim]:
        """Bulk claims of which no row is scored or being scored; for each model, the oldest comes first."""
        by_work = {claim.work: claim for claim in list(self.unanswered.values())}
        return [by_work[work] for work in self._pipeline.unstarted() if work in by_work]

    def hand_back_unstarted(self) -> None:
        """Hand back all bulk jobs that have not begun, and all jobs that wait for their model to be loaded.

        The last job is handed back first, so that the jobs keep their order in the queue.
        """
        for claim in reversed(self._put_aside.empty()):
            self.hand_back(claim.job.id)
        for claim in reversed(self.unstarted()):
            self.withdraw(claim)

    def withdraw(self, claim: ChunkClaim) -> None:
        if claim.work and self._pipeline.withdraw(claim.work):
            self.hand_back(claim.job.id)

    def hand_back_all(self) -> None:
        for job_id in reversed(list(self.unanswered)):
            self.hand_back(job_id)

    def hand_back(self, job_id: str) -> None:
        """Put a claimed job back into its queue, as the next job of its run. This does not count as an
        attempt.
        """
        claim = self.unanswered.get(job_id)
        if claim is None or not self._ends(claim):
            return
        with self._set_aside_if_damaged(claim.job, claim.queue):
            claim.held.hand_back()
        claim.span.add_event("handed back")
        claim.span.end()
        metrics.count_chunk("handed_back")
        with about_job(job_id):
            logger.debug("handed back")

    def _claim(self, claim: ChunkClaim, put_aside: bool) -> None:
        try:
            self._scorer.find_run(claim)
        except Exception as error:
            self._end(claim, error)
            return
        run = claim.run
        reads = put_aside and run is not None and self._scorer.reads(run)
        if reads and run and self._put_aside.has_group(run.spec):
            self._leave(claim)
        elif put_aside and run and (reads or self._scorer.evicts(run)):
            self._put_aside.put(run.spec, claim)
        else:
            self._begin(claim)

    def _begin(self, claim: ChunkClaim) -> None:
        """Put a claimed chunk into the pipeline, which scores the chunk and answers its job.

        If no producer waits for the scores any more, the job ends without a result. If the device fails, the
        job's attempt is recorded as failed, and then `DeviceLost` is raised.
        """
        try:
            self._scorer.begin(claim, partial(self._answer_scored, claim), whole=self._order.last)
        except WrongTokens as error:
            self.hand_back_all()  # so that no scores of wrong tokens are written
            self._pipeline.answer(partial(self._stop, [self._fast], f"a tokenizer library gave {error}"))
            return
        except Exception as error:
            self._end(claim, error)
            if isinstance(error, DeviceLost):
                raise
            return
        if claim.run is None or claim.work is None:
            self._pipeline.answer(partial(self._answer, claim, None))
            return
        self._order.began(claim.run.id, claim.priority, len(claim.work.scored.scores))
        self._accept(claim.run)

    def _accept(self, run: Run) -> None:
        """Withdraw this worker's refusals of a run and its model, because it can score the run now."""
        for key in (weights_key(run.spec), weights_key(self._scorer.spec(run)), ("run", run.id)):
            self._refusals.close(key)
        self._run_refusals.take_back(run.id)

    def _end(self, claim: ChunkClaim, error: Exception) -> None:
        """Decide what happens to a job after an error, by the error's `Fault`.

        Raises
        ------
        DamagedJob
            The job must be set aside.
        """
        fault = fault_of(error)
        if fault is Fault.JOB:
            raise error
        if fault is Fault.WORKER:
            nobody_can = self._refuse(claim, error)
            if nobody_can is None:
                self._leave(claim)
                return
            alike = nobody_can == str(error)  # whether all workers refuse for the same reason
            error, fault = RunFailed(nobody_can, option=_option(error) if alike else None), Fault.RUN
        if fault is Fault.RUN:
            failure = ChunkFailure(chunk=claim.chunk, message=str(error), fatal=True, option=_option(error))
            self._pipeline.answer(partial(self._answer, claim, failure))
        else:
            self._fail(claim, error)

    def _refuse(self, claim: ChunkClaim, error: Exception) -> str | None:
        """Refuse a run for a while, or all runs with its model if this host is the cause of the error.

        Returns why no live worker can score the run, or ``None`` if a live worker may be able to.
        """
        run, reason, key = claim.run, str(error), ("run", claim.run_id)
        if not isinstance(error, StillRefused):
            model = weights_key(self._scorer.spec(run)) if run and _is_of_the_host(error) else None
            took = system.monotonic() - claim.started if claim.started else 0.0
            if self._refusals.open(model or key, reason, _option(error), took=took):
                logger.warning("left to other workers: %s", reason)
        nobody_can = self._run_refusals.refuse(
            claim.run_id,
            claim.queue.name,
            reason,
            seconds=self._refusals.seconds(reason),  # until this worker tries the run again
            ttl=run.ttl if run else claim.job.run_ttl,
            in_redis=claim.in_redis,
        )
        if nobody_can:
            self._refusals.close(key)
        return nobody_can

    def _leave(self, claim: ChunkClaim) -> None:
        self._order.refused(claim.run_id)
        self.hand_back(claim.job.id)

    def _fail(self, claim: ChunkClaim, error: Exception) -> None:
        if not self._ends(claim):
            return  # the job was handed back
        claim.span.record_exception(error)
        claim.span.end()
        claim.fail(error)
        metrics.count_chunk("failed")

    def _answer_scored(self, claim: ChunkClaim) -> None:
        self._answer(claim, self._scorer.result(claim))

    def _answer(self, claim: ChunkClaim, result: ChunkResult | None) -> None:
        """Finish a job in the writing thread, and write its result if it has one."""
        if not self._ends(claim):
            return  # the job was handed back, and another worker may have it
        claim.forward.end()
        with about_job(claim.job.id), tracing.within(claim.span):
            with self._set_aside_if_damaged(claim.job, claim.queue), metrics.stage("write"):
                claim.finish(result)
            claim.span.end()
            if isinstance(result, ChunkScores):
                assert claim.run
                assert claim.work
                self._remember(claim)
                faults = claim.work.scored.faults.values()
                metrics.count_scored(claim.run, claim.priority, result, claim.job.created_at, faults)
                logger.debug("scored %d rows in %.2f s", len(result.scores), result.stats.seconds)
            elif result is None:
                metrics.count_chunk("dropped")
                logger.debug("dropped: the scores are no longer wanted")
            else:
                metrics.count_chunk("failed")
                logger.warning("the run cannot be scored: %s", result.message)

    def _remember(self, claim: ChunkClaim) -> None:
        """Remember the run of a scored chunk, in case the scores turn out to be wrong."""
        assert claim.engine
        for record in (
            self._unproven.setdefault(loaded_as(claim.engine.model), Answered()),
            *([self._fast] if claim.fast else []),
        ):
            record.add(claim.run_id, claim.job.run_ttl if claim.in_redis else 0)

    def _ends(self, claim: ChunkClaim) -> bool:
        """Return whether the caller must end a claim; false if another thread has ended it."""
        with self._lock:
            if self.unanswered.get(claim.job.id) is not claim:
                return False
            del self.unanswered[claim.job.id]
            return True

    def _proven(self, model: Model) -> None:
        self._unproven.pop(loaded_as(model), None)

    def _stop_wrong_device(self, model: Model, figures: str) -> None:
        """Stop this worker, because a model's probes (pairs with known scores) now have wrong scores."""
        reason = f"its device gets wrong scores of {model.name} now ({figures})"
        self._stop(list(self._unproven.values()), reason)

    def _stop(self, answered: Sequence[Answered], reason: str) -> None:
        """Stop this worker because its scores are wrong, and leave a note for each run that may have wrong
        scores.

        The writing thread runs this after it has written all earlier results.
        """
        since = min((record.since for record in answered), default=system.now())
        runs = {run: ttl for record in answered for run, ttl in record.runs.items()}
        began = datetime.fromtimestamp(since, UTC).isoformat(" ", "seconds")
        why = f"worker {self._worker.name} scores wrongly, perhaps since {began}: {reason}"
        named = tuple(runs)[-_NAMED:]
        more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
        logger.critical(
            "%s. The worker stops. It has answered these runs since then; those in progress end, score the "
            "others again: %s%s", why, ", ".join(named) or "none", more,
        )  # fmt: skip
        self._store.leave_notes({run: ttl for run, ttl in runs.items() if ttl}, why)
        self.wrong = LastReport(worker=self._worker.name, at=system.now(), reason=why, runs=named)
        self._worker.stop()
        self.hand_back_all()  # not in the main thread, which may be loading a model

    @contextmanager
    def _set_aside_if_damaged(self, job: ScoringJob, queue: OrderedQueue) -> Iterator[None]:
        """Set a job aside if the ``with`` block finds that the job's keys in Redis are damaged."""
        try:
            yield
        except (redis.RedisError, DamagedJob) as error:
            if cannot_serve(error):
                raise
            self.unanswered.pop(job.id, None)
            self._worker.forget(job)
            set_aside(queue, job.id.encode(), f"{type(error).__name__}: {error}")
            metrics.set_aside.inc()


def _option(error: Exception) -> str | None:
    """The field of the spec that the error is about, if any."""
    return error.option if isinstance(error, SpecError | RunFailed) else None


def _is_of_the_host(error: Exception) -> bool:
    """Return whether this host is the cause of an error, because a directory, the hub, a package or memory is
    missing.
    """
    return isinstance(error, WorkerError) or isinstance(error.__cause__, OSError | ImportError | MemoryError)
