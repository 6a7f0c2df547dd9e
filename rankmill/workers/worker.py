"""Defines ScoringWorker, the RQ worker that claims jobs ahead, renews leases, scores and ends jobs.

The worker has these threads:

- main claims jobs, fetches and tokenizes their chunks, and loads models.
- forward scores.
- writer writes results.
- heartbeat renews leases, and bell hears of requests.
- supervisor stops the worker when the process that started it ends.
- The health server and RQ's commands have threads of their own, and so have the rows of deterministic models.
- Short threads read a model's files, ask the hub, or prove a tokenizer.

The threads share the following, under these locks:

- `Pipeline`: its condition protects the waiting rows (in a lane for each engine and priority), the answers,
  the turns of the priorities, and what `Engine.see` records. Only forward touches the batches in progress,
  and writes their times.
- `Engine` and its `BatchSize`: only forward touches these once a chunk is in the pipeline; main only reads
  the limits. So main scores only with a model that it has just loaded (`EngineCache.warm`).
- Tokenizers have state, protected by `Model.lock`: forward scores the probes again, main prepares chunks.
- `Claims.unanswered`: `Claims._lock` decides which thread ends a claim. A `ChunkClaim` and its `Work` belong
  to main until they are put into the pipeline, then to forward, then to writer. Other threads read only their
  numbers.
- `Claims` remembers, for each model, the runs of which it has written scores: the writer adds runs. When
  forward has scored a model's probes again, and the scores are right, forward removes the runs of this model.
- RQ's ``executions``: main adds executions, and main and writer remove them. Loops over them take a copy
  (`list`) first.
- `EngineCache`, `ClaimOrder`, `Intake`, `ChunkScorer`, `Reading`: only main uses these, with two exceptions,
  which change nothing: the writer calls `ChunkScorer.result`, and other threads read `EngineCache.loading`.
- `Orders`: its lock protects answers and drains; new orders are a deque. The dict ``cold`` (models that are
  not loaded yet) is replaced, never changed.
- `Refusals`: only main writes; loops of other threads take a copy first.
- `Patience`, metrics and `ModelFigures` have their own locks. Redis clients and cached files are safe.
- Flags (``stopping``, ``drained``, ``loading``): main sets whole values; the writer may also set
  ``stopping``, which nothing clears.

Tests with the fixture ``interleaved`` run the worker with a switch of threads every 10 µs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import redis

from rankmill.jobs.cache import cache_folder, strangers
from rankmill.jobs.contract.arrow import leave_out_pandas
from rankmill.jobs.contract.errors import ConfigError, RankmillError, WorkerError
from rankmill.jobs.contract.home import model_of_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.worker_report import LAST_REPORTS, Doing, WorkerReport
from rankmill.jobs.runtime.connection import check_mode, check_options
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.logs import complain, set_up
from rankmill.jobs.runtime.passwords import mask_passwords, remember_password
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import WorkerSettings, load_settings
from rankmill.jobs.system import system
from rankmill.workers.backends.auto import choose_device
from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.engine.proof_time import ProofTime
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host import metrics
from rankmill.workers.host.device import resolve_claim_ahead, use_threads
from rankmill.workers.host.health import serve_health
from rankmill.workers.models.loading import Loaded
from rankmill.workers.models.sources import ModelCopies, Reading
from rankmill.workers.queue.chunks import ChunkScorer
from rankmill.workers.queue.claim_order import ClaimOrder, Refusals
from rankmill.workers.queue.claims import Claims
from rankmill.workers.queue.connection import give_up, stop_without_supervisor
from rankmill.workers.queue.heartbeat import WorkerHeartbeat
from rankmill.workers.queue.intake import Intake
from rankmill.workers.queue.orders import Orders
from rankmill.workers.rq.worker import POLL_SECONDS, DeathPenalty, RQWorker, TooLong, WorkOptions

LOAD_SECONDS = 1800
"""A worker refuses a model if downloading it, loading it and checking its scores take more seconds than this.
"""

_DRAIN_SECONDS = 86400
"""Before a model is unloaded to make room for another one, the worker scores its claimed chunks, but at most
for this many seconds.
"""

_READING_SECONDS = 0.05
"""In a burst or after ``max_jobs``, the worker checks again after this many seconds whether a model can be
loaded.
"""

_STOPPING_SECONDS = {1: 5.0, 2: 1.0}
"""After the first and the second signal to stop, the worker waits at most this many seconds for a server that
is away. If the server is silent, the worker may wait longer, until the server counts as away. After the wait,
the process ends, and the leases of its jobs lapse.
"""

_SHOWN = 50
"""A model's name in the worker's status text is cut at its beginning to this many characters."""

_SWITCH_SECONDS = 0.0001
"""Seconds that a thread keeps Python's lock while another waits. Python's own 5 ms would slow a GPU's thread
down.
"""

logger = logging.getLogger(__name__)


class ScoringWorker(RQWorker):
    """One long-lived process that scores chunks on one device.

    Start a worker with RQ's command line; settings come from the environment (``RANKMILL_DEVICE`` and so on,
    see ``configs/base.yaml``)::

        rq worker rankmill --worker-class rankmill.ScoringWorker --serializer json

    A ScoringWorker differs from RQ's SimpleWorker in four ways:

    - Jobs are JSON, and only `rankmill.score_chunk` and `rankmill.score_pairs` run, whatever the command line
      or the queue says.
    - While some jobs are scored, the next jobs are claimed, fetched and tokenized. Batches may have rows of
      several jobs (`Pipeline`).
    - A heartbeat thread renews the leases of all claimed jobs. When a lease (``lease_seconds``) ends, the job
      goes to another worker; a long job keeps its lease.
    - A chunk's scores are written in the transaction that finishes its job.

    On SIGTERM the worker finishes the batches in progress, and writes the results of the chunks that are then
    complete. If the worker is loading a model, it stops the loading at once. Then it puts all other claimed
    jobs back at the front of their queue. After a second SIGTERM, the worker puts all claimed jobs back at
    once.
    """

    _doing: Doing = ""
    _doing_words: Callable[[], str] = str

    def run(self, options: WorkOptions) -> bool:
        try:
            options_of_connection = self.connection.connection_pool.connection_kwargs
            remember_password(options_of_connection.get("password"))
            check_options(options_of_connection)
            check_mode(self.connection)
            settings = load_settings({"log_level": options.log_level and str(options.log_level).lower()})
            set_up(settings.log_level, settings.log_format, worker=self.name)
            require_worker_packages()
            leave_out_pandas()
            sys.setswitchinterval(min(_SWITCH_SECONDS, sys.getswitchinterval()))
            before = self.connection.get_retry()
            self._patience = Patience(settings.redis_wait_seconds, give_up)
            self._patience.has_waited = isinstance(before, Patience) and before.has_waited
            self.connection.set_retry(self._patience)
            self._prepare(settings)
            stop_without_supervisor()
            self.listen(options)
        except (RankmillError, redis.RedisError) as error:
            complain(mask_passwords(f"worker {self.name} cannot start: {error}"))
            raise SystemExit(os.EX_CONFIG if isinstance(error, ConfigError) else 1) from None
        self._pipeline.start()
        self._heartbeat.start()
        taken, most = 0, options.max_jobs
        try:
            self._orders.warm(self._settings.warm)  # only now, when producers and operators see this worker
            logger.info("listening on %s", ", ".join(self.queue_names()))
            while most is None or taken < most:
                if not self._claim_next(options.max_idle_time, wait=not options.burst):
                    break
                taken += 1
            while self._claims.waiting and not self.stopping:  # the last of `max_jobs` waits for its model
                self._claims.begin_put_aside()
                system.sleep(_READING_SECONDS)
        except (RankmillError, redis.RedisError, DeviceLost) as error:
            logger.critical("the worker cannot go on: %s", error)
            if isinstance(error, DeviceLost):
                self.stop()  # the waiting chunks are handed back
            raise SystemExit(os.EX_CONFIG if isinstance(error, ConfigError) else 1) from None
        finally:
            self._finish()
        if self._claims.wrong:
            raise SystemExit(1)
        return bool(taken)

    def _claim_next(self, max_idle_time: int | None, *, wait: bool) -> bool:
        """Wait for a job and claim it. Returns ``False`` if the worker should stop, in one of these cases:

        - The worker was told to stop.
        - With `wait`, the worker had no work for `max_idle_time` seconds.
        - Without `wait` (as in a burst), there is no job to claim, and no claimed chunk waits for its model.

        A worker claims nothing while it is drained, or while ``rq suspend`` keeps all workers from working.
        """
        idle_since = system.monotonic()
        while not self.stopping:
            full = False
            self._claims.begin_put_aside()
            self._orders.carry_out()
            self._engines.unload_idle(self._claims.engines)
            self.show_state(busy=bool(self._claims.unanswered))
            rests = self._orders.drained or self.suspended
            if not rests:
                if self._intake.claim_next(wait=wait):
                    return True
                full = self._intake.full
            if full or rests or self._claims.unanswered:
                idle_since = system.monotonic()
            if full:
                self._intake.wait_for_room()
                continue
            if not wait and not self._claims.waiting:
                return False  # if jobs remain in the queues, other workers take them
            if rests:
                system.sleep(POLL_SECONDS)
            elif not wait:
                system.sleep(_READING_SECONDS)  # claimed chunks wait while a model's files are read
            else:
                self._orders.warm_again()
                if max_idle_time is not None and system.monotonic() - idle_since >= max_idle_time:
                    return False
        return False

    def _finish(self) -> None:
        """Finish claimed work, or only the batches in progress if the worker was told to stop.

        Then hand back the other chunks, and unregister the worker.
        """
        try:
            self._pipeline.close(finish=not self.stopping)
        finally:
            self._claims.hand_back_all()
            if self._claims.wrong:
                with self.connection.pipeline() as pipe:
                    LAST_REPORTS.add(pipe, self._claims.wrong)
                    pipe.execute()
            self._heartbeat.stop()  # first, because a later heartbeat would announce the worker again
            self.teardown()  # type: ignore[no-untyped-call]
            logger.info("stopped")

    def _prepare(self, settings: WorkerSettings) -> None:
        self._settings, self._started = settings, system.now()
        self.lease_seconds = settings.lease_seconds
        use_threads(settings.threads)
        self._device = device = choose_device(settings.device, settings.backend)
        self.take_name(device)
        set_up(settings.log_level, settings.log_format, worker=self.name)
        cache = cache_folder(settings.cache_dir)
        if why := strangers(cache):
            raise ConfigError(f"cache_dir: {why}")
        copies = self._copies = ModelCopies(settings)
        pipeline = self._pipeline = Pipeline(settings.batch_wait_ms / 1000, lambda: self.stopping)
        self._engines = EngineCache(settings, device, self._load, self._drain)
        refusals = self._refusals = Refusals()
        self._claim_ahead = resolve_claim_ahead(settings.claim_ahead, device)
        order, reading = ClaimOrder(self._claim_ahead), Reading(cache, copies)
        scorer = ChunkScorer(self, self._engines, copies.pinned, reading, refusals, pipeline)
        claims = self._claims = Claims(self, scorer, pipeline, order, refusals)
        self._intake = Intake(self, claims, pipeline, order, refusals)
        self._orders = Orders(self._started, self._engines, self._spec, claims, refusals)
        self._metrics_url = serve_health(settings.metrics_address, self.connection, self._obstacle)
        self._heartbeat = WorkerHeartbeat(
            self,
            settings.heartbeat_seconds,
            self._report,
            lambda: pipeline.wedged() or DeathPenalty.is_overdue(),
            claims.drop_cancelled,
            self._orders,
        )
        if device == "cuda":
            metrics.gpu.watch()
        metrics.worker.info({"worker": self.name, "device": device})
        metrics.heartbeat_age.set_function(self._heartbeat.age)

    def load(self, spec: ScoreSpec) -> Loaded:
        """Load a model and check its scores; tests and simulations override this with their own models."""
        return load_proven(
            spec,
            self._device,
            backend=self._settings.backend,
            cache_dir=self._settings.cache_dir,
            copies=self._copies,
            on_proof=partial(self._tell_proof, spec),
        )

    def _load(self, spec: ScoreSpec) -> Loaded:
        if self.stopping:  # for instance, the signal came while another model's chunks were scored
            raise SystemExit(0 if self._claims.wrong is None else 1)
        self._tell("loading", lambda: f"loading {self._where(spec)}")
        try:
            with self.limit(LOAD_SECONDS):
                return self.load(spec)
        except TooLong:
            where = f"worker host {socket.gethostname()}"
            why = f"model {spec.model} was not loaded and proven after {LOAD_SECONDS} s on {where}"
            raise WorkerError(why) from None
        finally:
            self._tell("")

    def _drain(self) -> None:
        """Score the claimed chunks. This time does not count for the chunk that waits for another model."""
        with self.limit(_DRAIN_SECONDS):
            self._pipeline.drain()

    def _tell(self, doing: Doing, words: Callable[[], str] = str) -> None:
        """Send a heartbeat at once that says what this worker does, in the text that `words` returns.

        Each later heartbeat calls `words` again.
        """
        self._doing, self._doing_words = doing, words
        self._orders.news.set()

    def _tell_proof(self, spec: ScoreSpec, time: ProofTime) -> None:
        """Let heartbeats say that the model's scores are being checked, and how long that takes if known."""
        self._tell("proving", lambda: f"proving {self._where(spec)}, once on each host{time}")
        if str(time):
            logger.info("%s", self._doing_words())

    def _where(self, spec: ScoreSpec) -> str:
        name = spec.model if len(spec.model) <= _SHOWN else f"…{spec.model[1 - _SHOWN :]}"
        return f"{name} on {self._device}"

    def _spec(self, model: str) -> ScoreSpec:
        """Return the score spec for loading a model before any chunk needs it."""
        return self._copies.pinned(self._settings.spec(model_of_run(model)))

    def _report(self) -> WorkerReport:
        """Make the report that heartbeats write to Redis.

        Read the answers to orders first, so that no figure is older than an answer.
        """
        return WorkerReport(
            answers=self._orders.answers(),
            device=self._device,
            started=self._started,
            metrics_url=self._metrics_url,
            claim_ahead=self._claim_ahead,
            refusals=(*self._refusals.reasons(), *filter(None, self._orders.cold.values())),
            doing=self._doing,
            doing_words=self._doing_words(),
            **metrics.figures(),
        )

    def _obstacle(self) -> str | None:
        """Return why the worker cannot score now, such as a model of the setting ``warm`` that is not loaded.

        If it can score, return ``None``.
        """
        if self.stopping:
            return "the worker is stopping"
        if self._patience.trouble:
            return f"Redis cannot serve: {self._patience.trouble}"
        loading = self._engines.loading
        if loading:
            return f"loading {loading}"
        cold = list(self._orders.cold.items())
        return next((reason or f"{model} is not loaded yet" for model, reason in cold), None)

    def announce(self) -> None:
        self._heartbeat.announce()

    def signalled(self, signals: int) -> None:
        self._patience.most = _STOPPING_SECONDS[signals]

    def interrupt(self) -> None:
        """End the loading of a model at once, because it may take minutes."""
        if self._engines.loading:
            raise SystemExit(0)
