"""Begins and ends a worker's claimed jobs, and decides what happens to a job after an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import redis

from rankmill.jobs.contract.attempts import is_suspect
from rankmill.jobs.contract.errors import Fault, RunFailed, SpecError, WorkerError, fault_of
from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.spec import ScoreSpec, WeightsKey, weights_key
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.refusals import RunRefusals
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob, set_aside
from rankmill.jobs.protocol.worker_report import LastReport
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.logs import about_job
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.host import metrics
from rankmill.workers.models.loading import Model
from rankmill.workers.queue.chunks import ChunkClaim, ChunkScorer, PairsClaim, WrongTokens
from rankmill.workers.queue.claim_order import ClaimOrder
from rankmill.workers.queue.refusals import Refusals, StillRefused
from rankmill.workers.rq.job import ScoringJob
from rankmill.workers.rq.worker import RQWorker

GROUP = 8
GROUP_SECONDS = 3.0
"""Claims that wait for another model begin when `GROUP` of them are ready, when the oldest has waited
`GROUP_SECONDS`, or when no job waits in the queues.
"""

_NAMED = 100
"""The last report of a worker that stops because of wrong scores names at most this many runs, the latest
ones.
"""

_REMEMBERED = 100_000
"""A worker remembers at most this many of the runs of which it has scored chunks, the latest ones. If scores
turn out to be wrong, it leaves a note for each of these runs.
"""

logger = logging.getLogger(__name__)


class ModelQueue:
    """Holds claimed chunks whose scoring waits, in two cases: loading the chunk's model would evict another
    model, or a thread is still reading the files of the chunk's model.

    Chunks of one model begin together. If each chunk began when it was claimed, two models would evict each
    other job by job.
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
        """Remove and return all claims of one model: the model of the oldest ready claim. A claim is ready if
        the files of its model are not being read any more (`reading`).

        The result is empty in two cases:

        - No claim is ready.
        - More jobs wait in the queues (`more_to_come`), fewer than `GROUP` claims of any models are ready,
          and the oldest ready claim has waited less than `GROUP_SECONDS`.
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
    """The runs of which a worker has written scores, the latest last, each with its expiry in seconds (0 if
    the run is not in Redis).

    ``since`` is when the worker began to write these scores, in seconds since 1970.
    """

    since: float = field(default_factory=system.now)
    runs: dict[str, int] = field(default_factory=dict)

    def add(self, run: str, ttl: int) -> None:
        self.runs.pop(run, None)
        self.runs[run] = ttl
        if len(self.runs) > _REMEMBERED:
            del self.runs[next(iter(self.runs))]


def loaded_as(model: Model) -> tuple[object, ...]:
    """The key of a loaded model: a name is not enough, because a model may be loaded in several precisions
    and revisions.
    """
    return model.name, model.revision, model.backend.name, model.backend.precision, model.kind


class Claims:
    """Begins the jobs that a worker has claimed, in turn, and answers each of them exactly once.

    A claim is answered in one of four ways: its job ends, mostly with a result; or a failed attempt is
    recorded; or the job is set aside; or the job is handed back.

    Parameters
    ----------
    worker
        The RQ worker that claims the jobs.
    store
        The store of runs.
    scorer, pipeline
        The scorer turns a chunk into work, and puts the work into the pipeline.
    order
        Chooses which jobs to claim next, and is told which chunks were begun or handed back.
    refusals
        The models and runs that this worker refuses now.
    """

    def __init__(
        self,
        worker: RQWorker,
        store: RunStore,
        scorer: ChunkScorer,
        pipeline: Pipeline,
        order: ClaimOrder,
        refusals: Refusals,
    ) -> None:
        self._worker = worker
        self._store = store
        self._scorer = scorer
        self._pipeline = pipeline
        self._order = order
        self._refusals = refusals
        self._run_refusals = RunRefusals(store.redis, worker.name, worker.lease_seconds)
        self._put_aside = ModelQueue()
        self._unproven: dict[tuple[object, ...], Answered] = {}
        """For each loaded model, the runs of which scores were written since the model's probes last had the
        right scores.
        """
        self._fast = Answered()
        """The runs of which scores were written that may depend on a fast tokenizer library's tokens."""
        self._lock = system.Lock()
        self.unanswered: dict[str, ChunkClaim] = {}
        """The claims that are not answered yet, by job id. Other threads read copies; `_lock` decides which
        thread ends a claim.
        """
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

    def take(self, job: ScoringJob, queue: OrderedQueue) -> None:
        """Claim a job and let its chunk be scored.

        A job whose model would evict another one is put aside first (`ModelQueue`). A suspect job, which may
        kill its worker, is claimed only when the pipeline is empty, and is scored by itself. Otherwise a row
        of another chunk could kill the worker, and that would count as a failed attempt at the suspect job.
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
        """Begin to score the chunks of one model that wait in the `ModelQueue`, if `ModelQueue.take` returns
        any.
        """
        for claim in self._put_aside.take(self._more_to_come, self._scorer.reads):
            with (
                about_job(claim.job.id),
                tracing.within(claim.span),
                self._set_aside_if_damaged(claim.job, claim.queue),
            ):
                self._begin(claim)

    def _more_to_come(self) -> bool:
        return any(queue.count for queue in self._worker.queues)

    def drop_cancelled(self) -> None:
        """Stop scoring chunks of cancelled runs; write no result, because the same run may be submitted
        again.
        """
        for claim in list(self.unanswered.values()):
            if claim.work and not claim.is_wanted():
                self._pipeline.drop(claim.work, partial(self._answer, claim, None))

    def unstarted(self) -> list[ChunkClaim]:
        """Bulk claims of which no row is scored or being scored; for each model, the oldest comes first."""
        by_work = {claim.work: claim for claim in list(self.unanswered.values())}
        return [by_work[work] for work in self._pipeline.unstarted() if work in by_work]

    def hand_back_unstarted(self) -> None:
        """Hand back all jobs that wait in the `ModelQueue`, and all bulk jobs of which no row is scored or
        being scored. The last job is handed back first, so that the jobs keep their order in the queue.
        Requests that do not wait in the `ModelQueue` stay with this worker, because these requests are scored
        soon.
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

    def hand_back(self, job_id: str, *, to_others: bool = False) -> None:
        """Put a claimed job back into its queue, as the next job of its run; this does not count as an
        attempt.

        `to_others` says that the job is left to other workers, because this one cannot score it.
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
            logger.log(logging.DEBUG if to_others else logging.INFO, "handed back")

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
        """Put the chunk of a claim into the pipeline, to be scored and then answered. If no producer waits
        for the scores any more, the job ends without a result. If the device is lost, a failed attempt of the
        job is recorded, and `DeviceLost` is raised.
        """
        try:
            self._scorer.begin(claim, partial(self._answer_scored, claim), whole=self._order.last)
        except WrongTokens as error:
            self.hand_back_all()  # so that no claim is answered with scores of wrong tokens
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
        """Decide what happens to a job after an error, by the error's `Fault`; no other code decides this.

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
            alike = nobody_can == str(error)  # all workers refuse for the same reason
            error, fault = RunFailed(nobody_can, option=_option(error) if alike else None), Fault.RUN
        if fault is Fault.RUN:
            failure = ChunkFailure(chunk=claim.chunk, message=str(error), fatal=True, option=_option(error))
            self._pipeline.answer(partial(self._answer, claim, failure))
        else:
            self._fail(claim, error)

    def _refuse(self, claim: ChunkClaim, error: Exception) -> str | None:
        """Refuse a claim's run for a while, because this worker cannot score the run. If the host is the
        cause (`_is_of_the_host`), refuse all runs with the run's model. Returns why no live worker can score
        the run; ``None`` if a live worker may be able to.
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
            seconds=self._refusals.seconds(reason),  # afterwards this worker tries again
            ttl=run.ttl if run else claim.job.run_ttl,
            in_redis=claim.in_redis,
        )
        if nobody_can:
            self._refusals.close(key)
        return nobody_can

    def _leave(self, claim: ChunkClaim) -> None:
        self._order.refused(claim.run_id)
        self.hand_back(claim.job.id, to_others=True)

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
        """Finish a job and write its result, if it has one; the writing thread runs this."""
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
        """Remember the run of a claim whose scores were written, in case the scores turn out to be wrong."""
        assert claim.engine
        for record in (
            self._unproven.setdefault(loaded_as(claim.engine.model), Answered()),
            *([self._fast] if claim.fast else []),
        ):
            record.add(claim.run_id, claim.job.run_ttl if claim.in_redis else 0)

    def _ends(self, claim: ChunkClaim) -> bool:
        """Remove a claim from `unanswered`, and return whether the claim was in `unanswered`. If true, the
        caller must end the claim, and no other thread does. If false, the claim has ended already.
        """
        with self._lock:
            if self.unanswered.get(claim.job.id) is not claim:
                return False
            del self.unanswered[claim.job.id]
            return True

    def _proven(self, model: Model) -> None:
        self._unproven.pop(loaded_as(model), None)

    def _stop_wrong_device(self, model: Model, figures: str) -> None:
        """Stop this worker, because the probes of a model have wrong scores now. Pairs that were scored
        lately may have wrong scores too.
        """
        reason = f"its device gets wrong scores of {model.name} now ({figures})"
        self._stop(list(self._unproven.values()), reason)

    def _stop(self, answered: Sequence[Answered], reason: str) -> None:
        """Stop this worker because its scores are wrong: leave a note for each run that may have wrong
        scores, and hand back all claims.

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
        self.hand_back_all()  # not left to the main thread, which may be loading a model

    @contextmanager
    def _set_aside_if_damaged(self, job: ScoringJob, queue: OrderedQueue) -> Iterator[None]:
        """If the ``with`` block finds that a job's keys in Redis are damaged, set the job aside, because RQ
        might not even be able to mark it as failed.
        """
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
    """The field of the spec that the error is about; ``None`` if the error is about no field."""
    return error.option if isinstance(error, SpecError | RunFailed) else None


def _is_of_the_host(error: Exception) -> bool:
    """Return whether the host is the cause of an error, because the model's directory, the hub, a package or
    memory is missing. After such an error, the worker refuses all runs with the same model for a while.

    After any other error, the worker refuses only this run. The next run of the model may have other options,
    or the fault may be repaired before the next run begins.
    """
    return isinstance(error, WorkerError) or isinstance(error.__cause__, OSError | ImportError | MemoryError)
