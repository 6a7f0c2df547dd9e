"""The RQ worker: takes jobs off the queue, keeps them alive while they run, answers for them."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from redis.backoff import ExponentialWithJitterBackoff
from redis.client import Pipeline
from redis.retry import Retry
from rq import Queue, worker_registration
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import SimpleWorker

from jobs import keys
from jobs.abandoned import failure_handler
from jobs.errors import RankmillError
from jobs.registry import announce_worker, withdraw_worker
from jobs.results import ChunkResult
from jobs.runs import RunStore
from jobs.settings import Settings, load_settings
from jobs.tasks import bind_scorer
from workers.job import ScoringJob

if TYPE_CHECKING:
    from workers.scorer import ChunkScorer

HEARTBEAT_SECONDS = 5
LEASE_SECONDS = 15
"""A job whose worker has not beaten for this long is taken to be abandoned and runs elsewhere."""

_RECONNECTS = 100
"""Attempts at a command while the server is away: with pauses of up to 5 s, minutes in all."""

logger = logging.getLogger(__name__)


class ScoringWorker(SimpleWorker):
    """One long-lived process that scores chunks on one device.

    Start it with RQ's own command line; settings come from the environment (``RANKMILL_DEVICE``
    and so on, see ``configs/base.yaml``)::

        rq worker rankmill --worker-class workers.ScoringWorker --serializer json

    It differs from RQ's SimpleWorker in three things: jobs are JSON and can be nothing but
    `jobs.score_chunk`, whatever the command line or the queue says; a thread beats for the
    running jobs, so that a dead worker's jobs move on within 20 s and a long job is not taken
    for dead; and a chunk's scores are written in the transaction that finishes its job.
    """

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
        self._device = ""
        self._results: dict[str, ChunkResult] = {}
        self._stop_heartbeat = threading.Event()

    @property
    def dequeue_timeout(self) -> int:
        """Seconds an idle worker waits for a job before it beats again."""
        return HEARTBEAT_SECONDS

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        """Seconds until a job counts as abandoned; the heartbeat thread renews it."""
        return LEASE_SECONDS

    def work(self, *args: Any, **options: Any) -> bool:
        """Prepare the device, then take jobs until told to stop."""
        try:
            scorer = self._build_scorer(load_settings())
        except RankmillError as error:
            raise SystemExit(f"worker {self.name} cannot start: {error}") from None

        def score(run_id: str, chunk: int) -> None:
            result = scorer(run_id, chunk)
            if result is not None:
                self._results[keys.job_id(run_id, chunk)] = result

        bind_scorer(score)
        beat = threading.Thread(target=self._heartbeat_loop, name="heartbeat", daemon=True)
        beat.start()
        try:
            return super().work(*args, **options)
        finally:
            self._stop_heartbeat.set()
            beat.join(timeout=HEARTBEAT_SECONDS)
            bind_scorer(None)

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Score one chunk and answer for it."""
        try:
            super().execute_job(job, queue)
        finally:
            self._results.pop(job.id, None)

    def register_birth(self) -> None:
        """Also say that this worker is a ScoringWorker."""
        super().register_birth()  # type: ignore[no-untyped-call]
        self._announce()

    def register_death(self) -> None:
        """Also withdraw what `register_birth` said."""
        withdraw_worker(self.connection, self.name)
        super().register_death()  # type: ignore[no-untyped-call]

    def cleanup_execution(self, job: Job, pipeline: Pipeline, execution: Execution | None = None) -> None:
        """Put a finished chunk's result into the transaction that finishes its job."""
        super().cleanup_execution(job, pipeline, execution)
        if job.get_status(refresh=False) is not JobStatus.FINISHED:
            return
        if job.id in self._results:
            self.store.add_result(pipeline, str(job.args[0]), self._results[job.id], _run_ttl(job))

    def run_maintenance_tasks(self) -> None:
        """Nothing here: the heartbeat thread does it, also while a job runs."""
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ declares it None

    def _build_scorer(self, settings: Settings) -> ChunkScorer:
        # Imported here, in the process that will use the device, and not with the class.
        from workers.cache import EngineCache
        from workers.device import resolve_device, resolve_token_budget, use_threads
        from workers.scorer import ChunkScorer

        use_threads(settings.threads)
        self._device = resolve_device(settings.device)
        token_budget = resolve_token_budget(settings.token_budget, self._device)
        engines = EngineCache(self._device, settings.model_cache_size, token_budget)
        return ChunkScorer(self.store, engines, self.name)

    def _announce(self) -> None:
        worker_registration.register(self)  # again: the server may have restarted without its data
        announce_worker(self.connection, self.name, self._device, LEASE_SECONDS)

    def _heartbeat_loop(self) -> None:
        while not self._stop_heartbeat.wait(HEARTBEAT_SECONDS):
            try:
                self._announce()
                for execution in list(self.executions.values()):
                    self.maintain_heartbeats(execution.job, execution)
                self._clean_queues()
            except Exception:  # whatever it is, the jobs that run must not be taken for dead
                logger.exception("worker %s: heartbeat failed, trying again", self.name)

    def _clean_queues(self) -> None:
        """Hand on the jobs of dead workers, one worker at a time."""
        for queue in self.queues:
            # RQ's own lock lasts 15 minutes and would outlive a worker killed in here.
            if self.connection.set(queue.registry_cleaning_key, os.getpid(), nx=True, ex=HEARTBEAT_SECONDS):
                clean_registries(queue, self._exc_handlers)
                worker_registration.clean_worker_registry(queue)
                queue.intermediate_queue.cleanup(self, queue)


def _run_ttl(job: Job) -> int:
    """The run's expiry in seconds, which its jobs carry as theirs."""
    return int(job.failure_ttl or 0)
