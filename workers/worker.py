"""The RQ worker: claims jobs ahead, keeps them alive while they run, answers for them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from rq import Queue
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.exceptions import StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import JobTimeoutException
from rq.utils import now
from rq.worker import SimpleWorker
from rq.worker.base import DequeueStrategy, WorkerStatus

from jobs.errors import ConfigError, RankmillError, RedisFailed, RedisUnavailable, WorkerError
from jobs.job import is_suspect
from jobs.recovery import failure_handler
from jobs.results import ChunkResult, ChunkScores
from jobs.runs import RunStore
from jobs.runtime import tracing
from jobs.runtime.connection import impatient, unreachable
from jobs.runtime.hosts import require_worker_packages
from jobs.runtime.logs import about_job, set_up
from jobs.runtime.passwords import mask_passwords, remember_password
from jobs.runtime.patience import Patience, cannot_serve
from jobs.runtime.settings import WorkerSettings, load_settings
from jobs.worker_report import SCORING_FIELD, withdraw_worker
from workers import metrics
from workers.claims import Claim, ModelQueue
from workers.heartbeat import Heartbeat
from workers.intake import set_job_aside, take_job
from workers.rq_job import ScoringJob
from workers.stopping import LastResort

if TYPE_CHECKING:
    from workers.assembly import Parts

_POLL_SECONDS = 1
"""An idle worker looks that often whether it was told to stop."""

_PROBE_SECONDS = 0.5
"""How long a server may take to answer a worker that was told to stop."""

_REFUSED_SECONDS = 30
"""How often to say that Redis refuses a command."""

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
    _patience: Patience

    def __init__(self, *args: Any, **options: Any) -> None:
        # Whatever the command line says: nothing is unpickled, and nothing but score_chunk is run.
        super().__init__(*args, **{**options, "serializer": JSONSerializer, "job_class": ScoringJob})
        for queue in self.queues:
            queue.serializer, queue.job_class = JSONSerializer, ScoringJob
        self.log_result_lifespan = False
        self.store = RunStore(self.connection)
        self.push_exc_handler(failure_handler(self.store))  # type: ignore[no-untyped-call]
        self._claims: dict[str, Claim] = {}
        self._later = ModelQueue()
        self._told = 0

    @property
    def dequeue_timeout(self) -> int:
        """Seconds; for RQ, a connection that is silent for ten more than this is dead."""
        return _POLL_SECONDS

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds until a job counts as abandoned; the heartbeat thread renews it."""
        return self._heartbeat.lease_seconds

    def work(
        self,
        burst: bool = False,
        logging_level: str | None = None,
        date_format: str = DEFAULT_LOGGING_DATE_FORMAT,
        log_format: str = DEFAULT_LOGGING_FORMAT,
        max_jobs: int | None = None,
        max_idle_time: int | None = None,
        with_scheduler: bool = False,
        dequeue_strategy: DequeueStrategy = DequeueStrategy.DEFAULT,
    ) -> bool:
        """Prepare the device, then take jobs until told to stop; RQ's own loop ends at the first error."""
        try:
            remember_password(self.connection.connection_pool.connection_kwargs.get("password"))
            settings = load_settings({"log_level": logging_level and str(logging_level).lower()})
            set_up(settings.log_level, settings.log_format, worker=self.name)
            require_worker_packages()
            self._patience = Patience(settings.redis_wait_seconds, self._give_up)
            self.connection.set_retry(self._patience)
            self._prepare(settings)
        except RankmillError as error:
            print(mask_passwords(f"worker {self.name} cannot start: {error}"), file=sys.stderr)
            raise SystemExit(os.EX_CONFIG if isinstance(error, ConfigError) else 1) from None
        self._dequeue_strategy = dequeue_strategy
        self._install_signal_handlers()  # type: ignore[no-untyped-call]
        self.bootstrap(logging_level, date_format, log_format)
        self._heartbeat.start()
        logger.info("listening on %s", ", ".join(self.queue_names()))
        taken = 0
        try:
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
            while max_jobs is None or taken < max_jobs:
                self.check_for_suspension(burst)
                found = self._next(None if burst else _POLL_SECONDS, max_idle_time)
                if found is None:
                    break
                self.execute_job(*found)
                taken += 1
        except StopRequested:
            pass  # in a burst, if workers are suspended
        except (RankmillError, redis.RedisError) as error:
            logger.critical("cannot go on: %s", error)
            raise SystemExit(1) from None
        finally:
            self.teardown()
            self._heartbeat.stop()
        return bool(taken)

    def _next(self, seconds: int | None, max_idle_time: int | None) -> tuple[ScoringJob, Queue] | None:
        """Wait until little enough is claimed, then for a job; ``None`` when it is time to stop."""
        idle_since, refused_since = time.monotonic(), None
        while not self._stop_requested:
            self._begin_those_put_aside()
            if rest := self._parts.scorer.refusals.rest:
                if seconds is None:  # in a burst: what is left is for others
                    return None
                time.sleep(min(rest, _POLL_SECONDS))
                continue
            if not self._parts.pipeline.wait_for_room(self._parts.claim_ahead, _POLL_SECONDS):
                idle_since = time.monotonic()
                continue
            try:
                self._show_state()
                found = take_job(self._ordered_queues, seconds, self._claims, lambda: self._stop_requested)
            except redis.ResponseError as error:  # the queue's key is no list, say
                refused_since = self._bear(error, refused_since)
                continue
            if found is not None:
                self.reorder_queues(found[1])
                return found
            if seconds is None:
                if not self._later:
                    return None
                continue
            self._parts.engines.unload_idle()
            if max_idle_time is not None and time.monotonic() - idle_since >= max_idle_time:
                return None
        return None

    def _bear(self, error: redis.ResponseError, since: float | None) -> float:
        """Redis refuses what it should not: wait until somebody mends that, as long as for a server."""
        now = time.monotonic()
        if since is None or int(now - since) % _REFUSED_SECONDS == 0:
            logger.error("Redis refuses a command, trying again: %s", error)
        if since is not None and now - since > self._patience.seconds:
            raise RedisFailed(f"Redis refuses a command: {error}")
        time.sleep(_POLL_SECONDS)
        return now if since is None else since

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Claim a job: fetch and tokenize its chunk, and let it be scored behind.

        One whose model would take another's place is put aside first (`ModelQueue`).
        """
        assert isinstance(job, ScoringJob)
        with self._set_aside_if_damaged(job, queue):
            self._take_on(job, queue)

    def _take_on(self, job: ScoringJob, queue: Queue) -> None:
        claim = Claim(job, queue, self.prepare_execution(job), tracing.begin_for(job, worker=self.name))
        self._claims[job.id] = claim
        with about_job(job.id), tracing.within(claim.span):
            suspect = is_suspect(job)
            if suspect:
                self._wait_until_idle()
            self._claim(claim, put_aside=not suspect)
            if suspect:
                self._wait_until_idle()

    @contextmanager
    def _set_aside_if_damaged(self, job: Job, queue: Queue) -> Iterator[None]:
        """Have done with a job that cannot even be failed: keys of RQ's about it are damaged."""
        try:
            yield
        except redis.RedisError as error:
            if cannot_serve(error):
                raise
            self._claims.pop(job.id, None)
            for execution in [each for each in self.executions.values() if each.job_id == job.id]:
                self.executions.pop(execution.id, None)
            set_job_aside(queue, job.id.encode(), f"{type(error).__name__}: {error}")

    def _claim(self, claim: Claim, put_aside: bool) -> None:
        scorer = self._parts.scorer
        try:
            self.prepare_job_execution(claim.job, remove_from_intermediate_queue=len(self.queues) == 1)
            failure = scorer.find_run(claim)
        except WorkerError as error:
            self._refuse(claim, error)
            return
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
        except WorkerError as error:
            self._refuse(claim, error)
            return
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
            with (
                about_job(claim.job.id),
                tracing.within(claim.span),
                self._set_aside_if_damaged(claim.job, claim.queue),
            ):
                self._begin(claim)

    def _refuse(self, claim: Claim, error: WorkerError) -> None:
        """Put a job back that another worker may be able to do, behind what this one may."""
        scorer = self._parts.scorer
        failure = scorer.refused_runs.refuse(claim, str(error))
        if failure:
            self._parts.pipeline.answer(lambda: self._answer(claim, failure))
        else:
            self._hand_back(claim.job.id, at_front=False)
            scorer.refusals.sent_back(claim.job.id)

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
        report = partial(
            metrics.report,
            device=parts.device,
            started=time.time(),
            metrics_url=url,
            refusals=parts.scorer.refusals.reasons,
        )
        self._heartbeat = Heartbeat(
            self,
            settings.heartbeat_seconds,
            settings.lease_seconds,
            report,
            parts.pipeline.wedged,
            failure_handler(self.store),
            self._drop_cancelled,
        )
        probe = impatient(self.connection, _PROBE_SECONDS)
        LastResort(
            told=lambda: self._told,
            held=lambda: len(self._claims),
            working=lambda: parts.pipeline.working,
            serving=lambda: not (self._patience.trouble or unreachable(probe)),
        ).start()
        metrics.worker.info({"worker": self.name, "device": parts.device})
        metrics.heartbeat_age.set_function(self._heartbeat.age)
        metrics.refusals.set_function(lambda: len(parts.scorer.refusals.reasons()))
        metrics.claimed_jobs.set_function(lambda: len(self._claims))
        metrics.claimed_pairs.set_function(lambda: parts.pipeline.pending)
        for model in settings.warm:
            parts.engines.warm(settings.spec(model))

    def _obstacle(self) -> str | None:
        """What keeps the worker from scoring; a model that nobody has asked for yet does not."""
        if self._stop_requested:
            return "the worker is stopping"
        if self._patience.trouble:
            return f"Redis cannot serve: {self._patience.trouble}"
        loading = self._parts.engines.loading
        return f"loading {loading}" if loading else None

    def request_stop(self, signum: Any, frame: Any) -> None:
        """Also count the signal, for `LastResort`."""
        self._told = 1
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def request_force_stop(self, signum: int, frame: Any) -> None:
        """Also count the signal, for `LastResort`."""
        self._told = 2
        super().request_force_stop(signum, frame)

    def _shutdown(self) -> None:
        """Stop at the next look, and not wherever the signal came."""
        self._stop_requested = True

    def _give_up(self, error: RedisUnavailable) -> None:
        """End, with whatever is claimed: its leases have ended long ago."""
        logger.critical("ending: %s", error)
        logging.shutdown()
        os._exit(os.EX_UNAVAILABLE)

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
            with self._set_aside_if_damaged(claim.job, claim.queue), metrics.stage("write"):
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
        """Result and end of the job in one transaction, and without a WATCH, so that it can be repeated."""
        job = claim.job
        with self.connection.pipeline() as pipe:
            if result is not None:
                self.store.add_result(pipe, job.chunk[0], result, _run_ttl(job))
            self.increment_successful_job_count(pipeline=pipe)
            if job.started_at:
                self.increment_total_working_time(now() - job.started_at, pipe)
            self.cleanup_execution(job, pipe, claim.execution)
            pipe.delete(job.key, job.execution_registry.key)
            pipe.execute()

    def _hand_back(self, job_id: str, *, at_front: bool = True) -> None:
        """Put a claimed job back into its queue; that costs it no attempt."""
        claim = self._claims.pop(job_id, None)
        if claim is None:
            return
        with self._set_aside_if_damaged(claim.job, claim.queue), self.connection.pipeline() as pipe:
            self.cleanup_execution(claim.job, pipe, claim.execution)
            claim.queue._enqueue_job(claim.job, pipeline=pipe, at_front=at_front)  # as Job.retry does
            pipe.execute()
        claim.span.add_event("handed back")
        claim.span.end()
        metrics.count_chunk("handed_back")
        with about_job(job_id):
            logger.log(logging.INFO if at_front else logging.DEBUG, "handed back")


def _run_ttl(job: Job) -> int:
    """The run's expiry in seconds, which its jobs carry as theirs."""
    return int(job.failure_ttl or 0)
