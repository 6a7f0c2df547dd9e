"""The RQ worker: claims jobs ahead, keeps them alive while they run, answers for them."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.backoff import ExponentialWithJitterBackoff
from redis.client import Pipeline as Commands
from redis.retry import Retry
from rq import Queue
from rq.exceptions import DequeueTimeout, InvalidJobOperation
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException
from rq.utils import now
from rq.worker import SimpleWorker
from rq.worker.base import WorkerStatus

from jobs.errors import ConfigError, RankmillError
from jobs.job import chunk_of, is_suspect
from jobs.recovery import failure_handler
from jobs.results import ChunkResult, ChunkScores
from jobs.runs import RunStore
from jobs.runtime import tracing
from jobs.runtime.hosts import require_worker_packages
from jobs.runtime.logs import about_job, set_up
from jobs.runtime.passwords import mask_passwords, remember_password
from jobs.runtime.settings import WorkerSettings, load_settings
from jobs.worker_report import SCORING_FIELD, withdraw_worker
from workers import metrics
from workers.claims import Claim, ModelQueue
from workers.heartbeat import Heartbeat
from workers.rq_job import ScoringJob

if TYPE_CHECKING:
    from workers.assembly import Parts

_POLL_SECONDS = 1
"""An idle worker looks that often whether it was told to stop."""

_RECONNECTS = 100
"""Attempts at a command while the server is away: with pauses of up to 5 s, minutes in all."""

logger = logging.getLogger(__name__)


class ScoringWorker(SimpleWorker):
    """One long-lived process that scores chunks on one device.

    Start it with RQ's own command line; settings come from the environment (``RANKMILL_DEVICE``
    and so on, see ``configs/base.yaml``)::

        rq worker rankmill --worker-class workers.ScoringWorker --serializer json

    It differs from RQ's SimpleWorker in four things: jobs are JSON and can be nothing but
    `jobs.score_chunk`, whatever the command line or the queue says; the next jobs are claimed,
    fetched and tokenized while others are scored, and share batches with them (`Pipeline`); a
    thread beats for all claimed jobs, so that a dead worker's jobs move on when their lease
    (``lease_seconds``) ends and a long job is not taken for dead; and a chunk's scores are
    written in the transaction that finishes its job.

    SIGTERM lets the batch in progress be finished, answers what is complete with it and puts the
    other claimed jobs back at the front of their queue; a second SIGTERM does the latter at once.
    """

    _heartbeat: Heartbeat
    _parts: Parts

    def __init__(self, *args: Any, **options: Any) -> None:
        # Whatever the command line says: nothing is unpickled, and nothing but score_chunk is run.
        super().__init__(*args, **{**options, "serializer": JSONSerializer, "job_class": ScoringJob})
        for queue in self.queues:
            queue.serializer, queue.job_class = JSONSerializer, ScoringJob
        # For every command: RQ's loop ends at the first one that fails.
        self.connection.set_retry(Retry(ExponentialWithJitterBackoff(base=0.1, cap=5.0), _RECONNECTS))
        self.log_result_lifespan = False
        self.store = RunStore(self.connection)
        self.push_exc_handler(failure_handler(self.store))  # type: ignore[no-untyped-call]
        self._claims: dict[str, Claim] = {}
        self._later = ModelQueue()
        self._results: dict[str, ChunkResult] = {}

    @property
    def dequeue_timeout(self) -> int:
        """Seconds; for RQ, a connection that is silent for ten more than this is dead."""
        return _POLL_SECONDS

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds until a job counts as abandoned; the heartbeat thread renews it."""
        return self._heartbeat.lease_seconds

    def work(self, *args: Any, **options: Any) -> bool:
        """Prepare the device, then take jobs until told to stop."""
        level = options.pop("logging_level", None)  # of RQ's -v, -q and --logging_level
        try:
            remember_password(self.connection.connection_pool.connection_kwargs.get("password"))
            settings = load_settings({"log_level": level and str(level).lower()})
            set_up(settings.log_level, settings.log_format, worker=self.name)
            require_worker_packages()
            self._prepare(settings)
        except RankmillError as error:
            print(mask_passwords(f"worker {self.name} cannot start: {error}"), file=sys.stderr)
            raise SystemExit(os.EX_CONFIG if isinstance(error, ConfigError) else 1) from None
        # RQ does so only after it has said that the worker is there.
        self._install_signal_handlers()  # type: ignore[no-untyped-call]
        logger.info("listening on %s", ", ".join(self.queue_names()))
        self._heartbeat.start()
        try:
            return super().work(*args, **options)
        finally:
            self._heartbeat.stop()

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """Wait until little enough is claimed, then for a job; ``None`` when it is time to stop."""
        self._show_state()
        idle_since = time.monotonic()
        while not self._stop_requested:
            self._begin_those_put_aside()
            if not self._parts.pipeline.wait_for_room(self._parts.claim_ahead, _POLL_SECONDS):
                idle_since = time.monotonic()
                continue
            try:
                found = self._dequeue(None if timeout is None else _POLL_SECONDS)
            except DequeueTimeout:
                self._show_state()
                self._parts.engines.unload_idle()
                if max_idle_time is not None and time.monotonic() - idle_since >= max_idle_time:
                    return None
                continue
            if found is not None:
                self.reorder_queues(found[1])
            elif self._later:
                continue
            return found
        return None

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Claim a job: fetch and tokenize its chunk, and let it be scored behind.

        One whose model would take another's place is put aside first (`ModelQueue`).
        """
        assert isinstance(job, ScoringJob)
        claim = Claim(job, queue, self.prepare_execution(job), tracing.begin_for(job, worker=self.name))
        self._claims[job.id] = claim
        with about_job(job.id), tracing.within(claim.span):
            suspect = is_suspect(job)
            if suspect:
                self._wait_until_idle()
            self._claim(claim, put_aside=not suspect)
            if suspect:
                self._wait_until_idle()

    def _claim(self, claim: Claim, put_aside: bool) -> None:
        scorer = self._parts.scorer
        try:
            self.prepare_job_execution(claim.job, remove_from_intermediate_queue=len(self.queues) == 1)
            failure = scorer.find_run(claim)
        except Exception as error:
            self._fail(claim, error)
            return
        if failure:
            self._parts.pipeline.answer(lambda: self._answer(claim, failure))
        elif put_aside and claim.run and scorer.evicts(claim.run):
            self._later.put(claim.run.spec, claim)
        else:
            self._begin(claim)

    def _begin(self, claim: Claim) -> None:
        """Fetch and tokenize a claimed chunk, and let it be scored behind."""
        job, parts = claim.job, self._parts
        try:
            with self.death_penalty_class(job.timeout or 0, JobTimeoutException, job_id=job.id):
                failure = parts.scorer.begin(claim)
        except Exception as error:
            self._fail(claim, error)
            return
        if claim.engine is None or claim.work is None:
            parts.pipeline.answer(lambda: self._answer(claim, failure))
            return
        rows = len(claim.work.scored.scores)
        logger.debug("claimed %d rows", rows)
        claim.forward = tracing.begin("forward", claim.span, rows=rows)
        parts.pipeline.put(claim.engine, claim.work, lambda: self._answer(claim, parts.scorer.result(claim)))

    def _begin_those_put_aside(self) -> None:
        for claim in self._later.take(lambda: any(queue.count for queue in self.queues)):
            with about_job(claim.job.id), tracing.within(claim.span):
                self._begin(claim)

    def _fail(self, claim: Claim, error: Exception) -> None:
        """Let RQ deal with the exception at hand."""
        self._claims.pop(claim.job.id)
        claim.span.record_exception(error)
        claim.span.end()
        self._finalize_failure(claim.job, claim.queue, claim.execution, sys.exc_info())
        metrics.count_chunk("failed")

    def teardown(self) -> None:
        """Finish the batch in progress, or all work in a burst; hand back the rest; say goodbye."""
        try:
            self._parts.pipeline.close(finish=not self._stop_requested)
        finally:
            for job_id in list(self._claims):
                self._hand_back(job_id)
            super().teardown()  # type: ignore[no-untyped-call]
            logger.info("stopped")

    def serialize(self) -> dict[str, Any]:
        """RQ's record of this worker, which says also when it is gone that it was a ScoringWorker."""
        return {**super().serialize(), SCORING_FIELD: 1}

    def register_birth(self) -> None:
        """Also say that this worker is a ScoringWorker."""
        super().register_birth()  # type: ignore[no-untyped-call]
        self._heartbeat.announce()

    def register_death(self) -> None:
        """Also withdraw what `register_birth` said."""
        withdraw_worker(self.connection, self.name)
        super().register_death()  # type: ignore[no-untyped-call]

    def prepare_job_execution(self, job: Job, remove_from_intermediate_queue: bool = False) -> None:
        """What RQ does, but for the job's expiry, which RQ takes off."""
        with self.connection.pipeline() as pipe:
            self.heartbeat(self._heartbeat.lease_seconds, pipeline=pipe)
            job.heartbeat(now(), self._heartbeat.lease_seconds, pipeline=pipe)
            job.prepare_for_execution(self.name, pipeline=pipe)
            pipe.expire(job.key, _run_ttl(job))
            if remove_from_intermediate_queue:
                pipe.lrem(Queue(job.origin, connection=self.connection).intermediate_queue_key, 1, job.id)
            pipe.execute()

    def cleanup_execution(self, job: Job, pipeline: Commands, execution: Execution | None = None) -> None:
        """Put a finished chunk's result into the transaction that finishes its job."""
        super().cleanup_execution(job, pipeline, execution)
        if job.get_status(refresh=False) is not JobStatus.FINISHED:
            return
        if job.id in self._results:
            self.store.add_result(pipeline, chunk_of(job)[0], self._results[job.id], _run_ttl(job))

    def handle_execution_ended(self, job: Job, queue: Queue, heartbeat_ttl: int) -> None:
        """Without RQ's last beat, which would leave a piece of a job that Redis has forgotten."""
        job.ended_at = now()

    def run_maintenance_tasks(self) -> None:
        """Nothing here: the heartbeat thread does it, also while a job runs."""
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ declares it None

    def _prepare(self, settings: WorkerSettings) -> None:
        # Imported here, in the process that will use the device, and not with the class.
        from workers.assembly import assemble
        from workers.health import serve_health

        self._parts = parts = assemble(settings, self.store, self.name, self._wait_until_idle)
        url = serve_health(settings.metrics_address, self.connection, self._obstacle)
        report = partial(metrics.report, device=parts.device, started=time.time(), metrics_url=url)
        self._heartbeat = Heartbeat(
            self,
            settings.heartbeat_seconds,
            settings.lease_seconds,
            report,
            parts.pipeline.wedged,
            self._drop_cancelled,
        )
        metrics.worker.info({"worker": self.name, "device": parts.device})
        metrics.heartbeat_age.set_function(self._heartbeat.age)
        metrics.claimed_jobs.set_function(lambda: len(self._claims))
        metrics.claimed_pairs.set_function(lambda: parts.pipeline.pending)
        for model in settings.warm:
            parts.engines.warm(settings.spec(model))

    def _obstacle(self) -> str | None:
        """What keeps the worker from scoring; a model that nobody has asked for yet does not."""
        if self._stop_requested:
            return "the worker is stopping"
        loading = self._parts.engines.loading
        return f"loading {loading}" if loading else None

    def _shutdown(self) -> None:
        """Stop at the next look, and not wherever the signal came."""
        self._stop_requested = True

    def _dequeue(self, timeout: int | None) -> tuple[Job, Queue] | None:
        return Queue.dequeue_any(
            self._ordered_queues,
            timeout,
            connection=self.connection,
            job_class=self.job_class,
            serializer=self.serializer,
        )

    def _wait_until_idle(self) -> None:
        """Wait until all claimed before is answered, or this worker is told to stop."""
        while not self._stop_requested and not self._parts.pipeline.wait_until_idle(_POLL_SECONDS):
            pass

    def _show_state(self) -> None:
        """Tell `rq info` whether this worker is busy."""
        state = WorkerStatus.BUSY if self._claims else WorkerStatus.IDLE
        if self.get_state() != state:
            self.set_state(state)

    def _drop_cancelled(self) -> None:
        """Score no more of the chunks whose run was cancelled; no result, whose run may come back."""
        for claim in list(self._claims.values()):
            if claim.run and claim.work and not self.store.exists(claim.run.id):
                self._parts.pipeline.drop(claim.work, partial(self._answer, claim, None))

    def _answer(self, claim: Claim, result: ChunkResult | None) -> None:
        """Finish a job, its result in the same transaction; `None` writes none. In the writing thread."""
        if self._claims.pop(claim.job.id, None) is None:
            return  # handed back
        claim.forward.end()
        with about_job(claim.job.id), tracing.within(claim.span):
            with metrics.stage("write"):
                self._finish(claim, result)
            claim.span.end()
            if isinstance(result, ChunkScores):
                metrics.count_chunk("scored", claim.job.created_at)
                logger.debug("scored %d rows in %.2f s", len(result.scores), result.stats.seconds)
            elif result is None:
                metrics.count_chunk("dropped")
                logger.debug("dropped: nobody wants the scores any more")
            else:
                metrics.count_chunk("failed")
                logger.warning("the run cannot be scored: %s", result.message)

    def _finish(self, claim: Claim, result: ChunkResult | None) -> None:
        if result is not None:
            self._results[claim.job.id] = result
        try:
            self._finalize_success(claim.job, claim.queue, claim.execution, None)
        except InvalidJobOperation:
            # The job is gone: its transaction went through and the reply was lost, or Redis forgot it.
            self.executions.pop(claim.execution.id, None)
            logger.warning("the job was gone when it was to be finished")
        self._results.pop(claim.job.id, None)

    def _hand_back(self, job_id: str) -> None:
        """Put a claimed job back at the front of its queue; that costs it no attempt."""
        claim = self._claims.pop(job_id, None)
        if claim is None:
            return
        with self.connection.pipeline() as pipe:
            self.cleanup_execution(claim.job, pipe, claim.execution)
            claim.queue._enqueue_job(claim.job, pipeline=pipe, at_front=True)  # as Job.retry does
            pipe.execute()
        claim.span.add_event("handed back")
        claim.span.end()
        metrics.count_chunk("handed_back")
        with about_job(job_id):
            logger.info("handed back")


def _run_ttl(job: Job) -> int:
    """The run's expiry in seconds, which its jobs carry as theirs."""
    return int(job.failure_ttl or 0)
