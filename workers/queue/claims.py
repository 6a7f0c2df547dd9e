"""The jobs that a worker has claimed: how it begins them and how it finishes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import redis
from rq import Queue
from rq.job import Job
from rq.timeouts import JobTimeoutException
from rq.worker import SimpleWorker

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.contract.job import is_suspect
from rankmill.jobs.contract.priority import priority_of
from rankmill.jobs.contract.results import ChunkResult, ChunkScores
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.jobs.runtime import tracing
from rankmill.jobs.runtime.logs import about_job
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.workers.host import metrics
from rankmill.workers.queue.claim import Claim, ModelQueue
from rankmill.workers.queue.claim_order import ClaimOrder
from rankmill.workers.queue.rq_job import ScoringJob, set_job_aside
from rankmill.workers.queue.sources import fail

if TYPE_CHECKING:
    from rankmill.workers.engine.pipeline import Pipeline
    from rankmill.workers.queue.chunks import ChunkScorer

logger = logging.getLogger(__name__)


class Claims:
    """The jobs that a worker has claimed; it begins them in turn and answers each once.

    To answer a claim is to write a result, to record a failed attempt, or to hand the job back.

    Parameters
    ----------
    worker
        The RQ worker that claims the jobs.
    store
        Where runs live.
    parts
        The scorer and the pipeline.
    order
        Learns what is claimed.
    drain
        Waits until all claims are answered.
    """

    def __init__(
        self,
        worker: SimpleWorker,
        store: RunStore,
        scorer: ChunkScorer,
        pipeline: Pipeline,
        order: ClaimOrder,
        drain: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._store = store
        self.scorer = scorer
        self._pipeline = pipeline
        self._order = order
        self._drain = drain
        self._put_aside = ModelQueue()
        self.held: dict[str, Claim] = {}
        """The claims not answered yet, by job id."""
        metrics.claimed_jobs.set_function(lambda: len(self.held))
        metrics.claimed_pairs.set_function(lambda: pipeline.pending)
        metrics.refusals.set_function(lambda: len(self.scorer.refusals.reasons()))
        metrics.half_open_refusals.set_function(lambda: len(self.scorer.refusals.half_open()))

    @property
    def waiting(self) -> bool:
        """Whether some claims are put aside."""
        return bool(self._put_aside)

    def take(self, job: ScoringJob, queue: Queue) -> None:
        """Claim a job: fetch and tokenize its chunk, and put it into the pipeline.

        A job whose model would evict another is put aside first (`ModelQueue`). A suspect job, which may
        kill its worker, is scored while the worker holds no other.
        """
        with self._set_aside_if_damaged(job, queue):
            execution = self._worker.prepare_execution(job)
            claim = Claim(job, queue, execution, tracing.begin_for(job, worker=self._worker.name))
            self.held[job.id] = claim
            with about_job(job.id), tracing.within(claim.span):
                suspect = is_suspect(job)
                if suspect:
                    self._drain()
                self._claim(claim, put_aside=not suspect)
                if suspect:
                    self._drain()

    def begin_put_aside(self) -> None:
        """Begin the claims put aside for one model, if it is their turn."""
        for claim in self._put_aside.take(self._more_to_come, self.scorer.reads):
            with (
                about_job(claim.job.id),
                tracing.within(claim.span),
                self._set_aside_if_damaged(claim.job, claim.queue),
            ):
                self._begin(claim)

    def _more_to_come(self) -> bool:
        return any(queue.count for queue in self._worker.queues)

    def drop_cancelled(self) -> None:
        """Stop scoring chunks of cancelled runs; write no result, as the same run may be submitted again."""
        for claim in list(self.held.values()):
            if claim.run and claim.work and claim.source and not claim.source.wanted(claim.run):
                self._pipeline.drop(claim.work, partial(self._answer, claim, None))

    def unstarted(self, queue: Queue) -> list[Claim]:
        """Bulk claims of `queue` of which nothing is scored yet, in the order of their turns."""
        by_work = {claim.work: claim for claim in list(self.held.values()) if claim.queue == queue}
        return [by_work[work] for work in self._pipeline.unstarted() if work in by_work]

    def hand_back_all(self) -> None:
        """Put all claimed jobs back at the front of their queues, in order."""
        for job_id in reversed(list(self.held)):
            self.hand_back(job_id)

    def hand_back(self, job_id: str, *, at_front: bool = True) -> None:
        """Put a claimed job back into its queue; this does not count as an attempt.

        It is the next of its priority, or else behind all jobs, so that this worker sees others before it.
        """
        claim = self.held.pop(job_id, None)
        if claim is None:
            return
        with (
            self._set_aside_if_damaged(claim.job, claim.queue),
            self._worker.connection.pipeline() as pipe,
        ):
            self._worker.cleanup_execution(claim.job, pipe, claim.execution)
            queue = claim.queue if at_front else Queue(claim.queue.name, connection=claim.queue.connection)
            queue._enqueue_job(claim.job, pipeline=pipe, at_front=at_front)  # as Job.retry does
            if claim.run:
                pipe.hdel(keys.scored_rows(claim.run.id), str(claim.chunk))
            pipe.execute()
        claim.span.add_event("handed back")
        claim.span.end()
        metrics.count_chunk("handed_back")
        with about_job(job_id):
            logger.log(logging.INFO if at_front else logging.DEBUG, "handed back")

    def _claim(self, claim: Claim, put_aside: bool) -> None:
        if not self._went_well(claim, partial(self.scorer.find_run, claim)):
            return
        reads = put_aside and claim.run is not None and self.scorer.reads(claim.run)
        if reads and claim.run and self._put_aside.has_group(claim.run.spec):
            self._leave(claim)
        elif put_aside and claim.run and (reads or self.scorer.evicts(claim.run)):
            self._put_aside.put(claim.run.spec, claim)
        else:
            self._begin(claim)

    def _begin(self, claim: Claim) -> None:
        """Fetch and tokenize a claimed chunk, and put it into the pipeline."""
        if not self._went_well(claim, partial(self._fetch, claim)):
            return
        if claim.engine is None or claim.work is None:
            self._pipeline.answer(lambda: self._answer(claim, None))
            return
        rows = len(claim.work.scored.scores)
        logger.debug("claimed %d rows", rows)
        run_id = claim.job.chunk[0]
        self._order.began(run_id, rows)
        claim.forward = tracing.begin("forward", claim.span, rows=rows)
        answer = partial(self._answer_scored, claim)
        priority, whole = priority_of(run_id), self._order.last
        self._pipeline.put(claim.engine, claim.work, answer, priority, whole=whole)

    def _fetch(self, claim: Claim) -> None:
        job = claim.job
        with self._worker.death_penalty_class(job.begin_seconds, JobTimeoutException, job_id=job.id):
            self.scorer.begin(claim)

    def _went_well(self, claim: Claim, step: Callable[[], ChunkResult | None]) -> bool:
        """Take a step with a claim; if it raises an error or has a result, the claim is answered with it."""
        try:
            result = step()
        except WorkerError as error:
            self._refuse(claim, error)
        except DamagedJob:
            raise
        except Exception as error:
            self._fail(claim, error)
        else:
            if result is None:
                return True
            self._pipeline.answer(lambda: self._answer(claim, result))
        return False

    def _refuse(self, claim: Claim, error: WorkerError) -> None:
        """Put a job at the back of its queue, as another worker may be able to score it."""
        failure = self.scorer.refused_runs.refuse(claim, str(error))
        if failure:
            self._pipeline.answer(lambda: self._answer(claim, failure))
        else:
            self._leave(claim)

    def _leave(self, claim: Claim) -> None:
        """Leave a job to another worker."""
        self._order.refused(claim.job.chunk[0])
        self.hand_back(claim.job.id, at_front=False)
        self.scorer.refusals.sent_back(claim.job.id)

    def _fail(self, claim: Claim, error: Exception) -> None:
        """Let RQ handle an exception: a failed attempt."""
        self.held.pop(claim.job.id)
        claim.span.record_exception(error)
        claim.span.end()
        fail(self._worker, claim, error)
        metrics.count_chunk("failed")

    def _answer_scored(self, claim: Claim) -> None:
        self._answer(claim, self.scorer.result(claim))

    def _answer(self, claim: Claim, result: ChunkResult | None) -> None:
        """Finish a job and write its result, if any, in one transaction; runs in the writing thread."""
        if self.held.pop(claim.job.id, None) is None:
            return  # it was handed back
        claim.forward.end()
        with about_job(claim.job.id), tracing.within(claim.span):
            with self._set_aside_if_damaged(claim.job, claim.queue), metrics.stage("write"):
                assert claim.source
                claim.source.finish(self._worker, claim, result)
            claim.span.end()
            if isinstance(result, ChunkScores):
                assert claim.run
                metrics.count_scored(claim.run, result, claim.job.created_at)
                logger.debug("scored %d rows in %.2f s", len(result.scores), result.stats.seconds)
            elif result is None:
                metrics.count_chunk("dropped")
                logger.debug("dropped: nobody wants the scores any more")
            else:
                metrics.count_chunk("failed")
                logger.warning("the run cannot be scored: %s", result.message)

    @contextmanager
    def _set_aside_if_damaged(self, job: Job, queue: Queue) -> Iterator[None]:
        """Set aside a job with damaged keys, which RQ may not even be able to mark as failed."""
        try:
            yield
        except (redis.RedisError, DamagedJob) as error:
            if cannot_serve(error):
                raise
            self.held.pop(job.id, None)
            executions = [each for each in self._worker.executions.values() if each.job_id == job.id]
            with self._worker.connection.pipeline() as pipe:
                for execution in executions:
                    self._worker.cleanup_execution(job, pipe, execution)
                pipe.execute(raise_on_error=False)  # one of these keys may itself be damaged
            set_job_aside(queue, job.id.encode(), f"{type(error).__name__}: {error}")
