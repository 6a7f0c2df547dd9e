"""The RQ worker: claims jobs ahead, renews their leases while they are scored, and finishes them."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from rq import Queue
from rq.defaults import DEFAULT_LOGGING_DATE_FORMAT, DEFAULT_LOGGING_FORMAT
from rq.exceptions import StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker.base import DequeueStrategy

from rankmill.jobs.contract.arrow import leave_out_pandas
from rankmill.jobs.contract.errors import ConfigError, RankmillError
from rankmill.jobs.contract.spec import weights_key
from rankmill.jobs.protocol.ordered_queue import OrderedQueue
from rankmill.jobs.protocol.recovery import failure_handler
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.connection import impatient, unreachable
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.passwords import mask_passwords, remember_password
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import WorkerSettings, load_settings
from rankmill.workers.host import metrics
from rankmill.workers.queue.claim_order import ClaimOrder
from rankmill.workers.queue.claims import Claims
from rankmill.workers.queue.heartbeat import Heartbeat
from rankmill.workers.queue.intake import POLL_SECONDS, Intake
from rankmill.workers.queue.leased_worker import LeasedWorker
from rankmill.workers.queue.orders import Orders
from rankmill.workers.queue.rq_job import ScoringJob
from rankmill.workers.queue.scored_rows import ScoredRowsBeat
from rankmill.workers.queue.stopping import LastResort, RefusedCommands, give_up, stop_without_supervisor

if TYPE_CHECKING:
    from rankmill.workers.assembly import Parts

_PROBE_SECONDS = 0.5
"""How long (s) a server may take to answer a worker that is stopping."""

_READING_SECONDS = 0.05
"""In a burst, until the worker looks again whether a model can be loaded."""

logger = logging.getLogger(__name__)


class ScoringWorker(LeasedWorker):
    """One long-lived process that scores chunks on one device.

    Start it with RQ's own command line; settings come from the environment (``RANKMILL_DEVICE``
    and so on, see ``configs/base.yaml``)::

        rq worker rankmill --worker-class rankmill.ScoringWorker --serializer json

    It differs from RQ's SimpleWorker in four ways:

    - Jobs are JSON, and only `rankmill.score_chunk` and `rankmill.score_pairs` run, whatever the command line
      or the queue says.
    - The next jobs are claimed, fetched and tokenized while others are scored, and share batches
      with them (`Pipeline`).
    - A heartbeat thread renews the leases of all claimed jobs. The jobs of a dead worker go to
      others when their lease (``lease_seconds``) ends; a long job keeps its lease.
    - A chunk's scores are written in the transaction that finishes its job.

    On SIGTERM the worker finishes the batch in progress, writes the results of the chunks that are
    complete with it and puts the other claimed jobs back at the front of their queue. A second
    SIGTERM puts them back at once.
    """

    _claims: Claims
    _scored_rows: ScoredRowsBeat
    _orders: Orders
    _intake: Intake
    _parts: Parts
    _patience: Patience

    def __init__(self, *args: Any, **options: Any) -> None:
        # Whatever the command line says, nothing is unpickled and nothing but scoring runs.
        super().__init__(*args, **{**options, "serializer": JSONSerializer, "job_class": ScoringJob})
        ordered = partial(
            OrderedQueue, connection=self.connection, serializer=JSONSerializer, job_class=ScoringJob
        )
        self.queues = [ordered(queue.name) for queue in self.queues]
        self._ordered_queues = self.queues[:]
        self.log_result_lifespan = False
        self.store = RunStore(self.connection)
        self.push_exc_handler(failure_handler(self.store))  # type: ignore[no-untyped-call]
        self._stop_signals = 0

    @property
    def dequeue_timeout(self) -> int:
        """Seconds; RQ takes a connection for dead that is silent for ten seconds longer than this."""
        return POLL_SECONDS

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
        """Prepare the device, then take jobs until asked to stop; RQ's own loop ends at the first error."""
        try:
            remember_password(self.connection.connection_pool.connection_kwargs.get("password"))
            settings = load_settings({"log_level": logging_level and str(logging_level).lower()})
            set_up(settings.log_level, settings.log_format, worker=self.name)
            require_worker_packages()
            leave_out_pandas()
            self._patience = Patience(settings.redis_wait_seconds, give_up)
            self.connection.set_retry(self._patience)
            self._prepare(settings)
        except RankmillError as error:
            print(mask_passwords(f"worker {self.name} cannot start: {error}"), file=sys.stderr)
            raise SystemExit(os.EX_CONFIG if isinstance(error, ConfigError) else 1) from None
        self._dequeue_strategy = dequeue_strategy
        self._install_signal_handlers()  # type: ignore[no-untyped-call]
        stop_without_supervisor()
        self.bootstrap(logging_level, date_format, log_format)
        self._heartbeat.start()
        self._scored_rows.start()
        logger.info("listening on %s", ", ".join(self.queue_names()))
        taken = 0
        try:
            if with_scheduler:
                self._start_scheduler(burst, logging_level, date_format, log_format)
            while max_jobs is None or taken < max_jobs:
                self.check_for_suspension(burst)
                found = self._next(None if burst else POLL_SECONDS, max_idle_time)
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
        return bool(taken)

    def _next(self, seconds: int | None, max_idle_time: int | None) -> tuple[ScoringJob, Queue] | None:
        """Wait until there is room for another claim, then for a job; ``None`` when it is time to stop."""
        idle_since, refused = time.monotonic(), RefusedCommands(self._patience.seconds)
        while not self._stop_requested:
            try:
                self._claims.begin_put_aside()
            except redis.ResponseError as error:
                refused.wait(error)
                continue
            self._orders.carry_out()
            if self._orders.drained:
                if seconds is None and not self._claims.waiting:
                    return None  # in a burst: other workers take what is left
                self.show_state(busy=bool(self._claims.held))
                self._orders.wait(POLL_SECONDS)
                idle_since = time.monotonic()
                continue
            if rest := self._claims.scorer.refusals.rest:
                if seconds is None and not self._claims.waiting:  # in a burst: others take what is left
                    return None
                time.sleep(min(rest, POLL_SECONDS))
                continue
            try:
                self.show_state(busy=bool(self._claims.held))
                found = self._intake.next(wait=seconds is not None)
            except redis.ResponseError as error:  # for instance, the queue's key is not a list
                refused.wait(error)
                continue
            if found is not None:
                self.reorder_queues(found[1])
                return found
            if self._intake.full:
                idle_since = time.monotonic()
                continue
            if seconds is None:
                if not self._claims.waiting:
                    return None
                time.sleep(_READING_SECONDS)  # a model's files are being read
                continue
            self._parts.engines.unload_idle()
            self._orders.warm_again()
            if max_idle_time is not None and time.monotonic() - idle_since >= max_idle_time:
                return None
        return None

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Claim a job; the pipeline scores it later, together with others."""
        assert isinstance(job, ScoringJob)
        self._claims.take(job, queue)

    def teardown(self) -> None:
        """Finish the batch in progress, or all work in a burst; hand back the rest; unregister."""
        try:
            self._parts.pipeline.close(finish=not self._stop_requested)
        finally:
            self._claims.hand_back_all()
            self._scored_rows.stop()
            self._heartbeat.stop()  # a beat after the next line would announce the worker again
            super().teardown()  # type: ignore[no-untyped-call]
            logger.info("stopped")

    def _prepare(self, settings: WorkerSettings) -> None:
        # Imported here and not with the class: only in the process that will use the device.
        from rankmill.workers.assembly import assemble, prepare_device
        from rankmill.workers.host.health import serve_health

        device = prepare_device(settings)
        self.take_name(device)
        set_up(settings.log_level, settings.log_format, worker=self.name)
        self._parts = parts = assemble(settings, device, self.store, self.name, self._wait_until_idle)
        order = ClaimOrder(parts.claim_ahead)
        self._claims = Claims(self, self.store, parts.scorer, parts.pipeline, order, self._wait_until_idle)
        self._intake = Intake(
            self.name,
            lambda: self._ordered_queues,
            self._claims,
            parts.pipeline,
            order,
            lambda: self._stop_requested,
        )
        self._scored_rows = ScoredRowsBeat(self.store, self._claims)
        started = time.time()
        self._orders = Orders(
            started,
            parts.engines,
            parts.spec,
            lambda: len(self._claims.held),
            lambda spec: parts.scorer.refusals.close(weights_key(spec)),
        )
        url = serve_health(settings.metrics_address, self.connection, self._obstacle)
        report = partial(
            metrics.report,
            device=parts.device,
            started=started,
            metrics_url=url,
            claim_ahead=parts.claim_ahead,
            refusals=lambda: (*parts.scorer.refusals.reasons(), *self._orders.cold.values()),
            answers=self._orders.answers,
            half_open=parts.scorer.refusals.half_open,
        )
        self._heartbeat = Heartbeat(
            self,
            settings.heartbeat_seconds,
            settings.lease_seconds,
            report,
            parts.pipeline.wedged,
            failure_handler(self.store),
            self._claims.drop_cancelled,
            self._orders,
        )
        probe = impatient(self.connection, _PROBE_SECONDS)
        LastResort(
            signals=lambda: self._stop_signals,
            held=lambda: len(self._claims.held),
            working=lambda: parts.pipeline.working,
            serving=lambda: not (self._patience.trouble or unreachable(probe)),
        ).start()
        if parts.device == "cuda":
            metrics.gpu.watch()
        metrics.worker.info({"worker": self.name, "device": parts.device})
        metrics.heartbeat_age.set_function(self._heartbeat.age)
        self._orders.warm(settings.warm)

    def _obstacle(self) -> str | None:
        """Why the worker cannot score now, if so; a model that nobody has asked for is no reason."""
        if self._stop_requested:
            return "the worker is stopping"
        if self._patience.trouble:
            return f"Redis cannot serve: {self._patience.trouble}"
        loading = self._parts.engines.loading
        return f"loading {loading}" if loading else next(iter(self._orders.cold.values()), None)

    def request_stop(self, signum: Any, frame: Any) -> None:
        """Also count the signal, for `LastResort`."""
        self._stop_signals = 1
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def request_force_stop(self, signum: int, frame: Any) -> None:
        """Also count the signal, for `LastResort`."""
        self._stop_signals = 2
        super().request_force_stop(signum, frame)

    def _shutdown(self) -> None:
        """Stop at the next check, and not in the middle of what the signal interrupted."""
        self._stop_requested = True

    def _wait_until_idle(self) -> None:
        """Wait until all jobs claimed so far are finished, or this worker is asked to stop."""
        while not self._stop_requested and not self._parts.pipeline.wait_until_idle(POLL_SECONDS):
            pass
