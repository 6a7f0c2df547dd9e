"""Refuses requests if too many are in progress, or if the workers need too long for the waiting ones."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis

from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.refusals import Kind, kind_of, overloaded
from rankmill.extensions.gateway.settings import GatewaySettings
from rankmill.extensions.gateway.watch import Outcome, tell
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.contract.home import model_of_run
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport, known_reports, listed_workers
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.aio import bridge

_LOOK_SECONDS = 1.0

_SPEED_SECONDS = 5.0
"""Seconds between two reads of the workers' reports, from which the gateway computes their speed."""

_MOST_RETRY = 60

_AT_FIRST = 2048
"""Before the workers' speed is known, the requests in progress may together have at most this many pairs. A
request that would exceed this number is refused, unless no other request is in progress.
"""

_ENOUGH_TOKENS = 10_000
"""Tokens that a worker must have computed before its speed counts, because its first batches are slow."""

_TOKENS_PER_CHAR, _TOKENS_PER_JOB = 0.25, 100.0
"""First guesses: the tokens of a character (as in English text), and the tokens of a job. Scored requests
correct both.
"""

_TELLING_CHARS = 50_000
"""If a request has this many characters, and more tokens per character than the running mean, then its tokens
per character become the new mean. Chinese, for example, can have four times as many tokens per character as
English.
"""

_SHARE = 0.05
"""Least weight of the latest scored request in running means, such as the mean tokens of a job."""

_OUTCOMES: dict[Kind, Outcome] = {
    "overloaded": "overloaded", "backend": "failed", "unavailable": "failed", "timeout": "failed",
}  # fmt: skip
"""The outcome to count for a kind of refusal; kinds that are missing here are the caller's fault."""

_FORWARD = STAGES.index("forward")

logger = logging.getLogger(__name__)


class LoadShedder:
    """Refuses requests that would wait too long.

    `request` checks a request before its body is read, and `work` checks it when its pairs are known.

    Parameters
    ----------
    settings
        The gateway's settings, which have its limits and its queue.
    client
        A client whose commands wait in the event loop (`LoopRedis`).

    Attributes
    ----------
    requests
        The number of requests in progress.
    backlog_seconds
        Estimate of the seconds that the workers need for all requests that wait in the queue.
    workers
        Number of workers of the queue that take work.
    unready
        Why a request for the gateway's model would have to wait, such as ``there is no worker``. ``None`` if
        a live worker has the model, or has had it.
    """

    def __init__(self, settings: Settings, client: redis.Redis) -> None:
        self._settings = settings
        self._own = settings.of(GatewaySettings)
        self._model = _without_version(model_of_run(settings.model))
        self._redis: Any = client
        self.requests = 0
        self._speed: float | None = None
        """Tokens that all workers together compute in a second; ``None`` until this is known."""
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._tokens_per_job = _TOKENS_PER_JOB
        self._reported: float | None = None
        """Mean tokens of a pair in the workers' reports. ``None`` before the first report, and again as soon
        as this gateway has scored a request.
        """
        self._has_scored = False
        self._taken = 0
        """Tokens of this gateway's requests in progress, estimated from their characters."""
        self._pairs_taken = 0
        self._tenants: set[str] = set()
        """Tenants whose bulk work waits in the queue, each as the digits that `group_of` returns."""
        self._read = -math.inf
        self.backlog_seconds = 0.0
        self.workers = 0
        self.unready: str | None = "the workers have not been looked at yet"
        self._able: set[str] = set()
        """Names of live workers that have the gateway's model, or have had the model and can load it again.
        """
        self._counts = Counter[Outcome]()
        """Outcomes that are counted but not yet written to Redis."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as in progress within the ``with`` block, and then count its outcome.

        Raises
        ------
        Refusal
            The gateway is ``overloaded``: too many requests are in progress, or the workers need too long for
            the waiting requests.
        """
        try:
            self._check_room()
            self.requests += 1
            metrics.in_progress.set(self.requests)
            try:
                yield
            finally:
                self.requests -= 1
                metrics.in_progress.set(self.requests)
        except Exception as error:
            if outcome := _OUTCOMES.get(kind_of(error)):
                self._counts[outcome] += 1
            raise
        finally:
            self._counts["requests"] += 1

    def _check_room(self) -> None:
        if self.requests >= self._own.gateway_requests:
            raise overloaded(f"{self.requests:,} requests are in progress")
        late = self.backlog_seconds - self._own.gateway_backlog_seconds
        if late > 0:
            need = math.ceil(self.backlog_seconds)
            why = f"the workers need {need:,} s for the requests that wait already"
            raise overloaded(why, seconds=min(math.ceil(late), _MOST_RETRY))

    @contextmanager
    def work(self, chars: int, pairs: int, priority: Priority, tenant: str) -> Iterator[None]:
        """Count the pairs of a tenant's request as work in progress within the ``with`` block.

        Raises
        ------
        Refusal
            The gateway is ``overloaded``: the workers would need too long for this request and the requests
            before this one.
        """
        tokens = self._tokens_per_char * chars
        if self._reported:
            tokens = max(tokens, self._reported * pairs)
        # Do not count parts of tokens: after additions and subtractions, a sum might not be exactly 0.
        tokens = math.ceil(tokens)
        parts = 1 + (len(self._tenants - {tenant}) if priority == "bulk" else 0)
        self._check(tokens * parts, pairs)
        self._taken += tokens
        self._pairs_taken += pairs
        try:
            yield
        finally:
            self._taken -= tokens
            self._pairs_taken -= pairs

    def _check(self, tokens: int, pairs: int) -> None:
        """Raise `Refusal` if the workers would take too long for a request and the requests before it.

        - A request with no other request before it is never refused.
        - If the workers' speed is not known, at most `_AT_FIRST` pairs may be in progress.
        """
        if self._speed is None:
            if self._pairs_taken and self._pairs_taken + pairs > _AT_FIRST:
                raise overloaded("it is not known yet how fast the workers are")
            return
        taken = max(self._taken / self._speed, self.backlog_seconds)
        own = tokens / self._speed
        late = taken + own - self._own.gateway_backlog_seconds
        if taken and late > 0:
            need = f"{math.ceil(taken):,} s for the requests that wait already"
            why = f"the workers need {need}, and {math.ceil(own):,} s for this one"
            seconds = min(math.ceil(min(late, taken)), _MOST_RETRY)
            raise overloaded(why, "send it again later, or in smaller parts", seconds=seconds)

    def note(self, chars: int, tokens: int, jobs: int) -> None:
        """Update the running means, such as the mean tokens of a job, with a scored request's numbers of
        characters, tokens and jobs.
        """
        if tokens and chars:
            self._has_scored, self._reported = True, None
            more = tokens / chars - self._tokens_per_char
            # A request with fewer tokens than expected counts little in the mean: its long texts may have
            # been cut.
            share = min(chars / _TELLING_CHARS, 1.0) if more > 0 else 0.0
            self._tokens_per_char += max(share, _SHARE) * more
            self._tokens_per_job += _SHARE * (tokens / max(jobs, 1) - self._tokens_per_job)

    async def watch(self) -> None:
        while True:
            try:
                await bridge.run(self.look)
            except (RankmillError, redis.RedisError, OSError) as error:
                logger.debug("the queue cannot be looked at: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Estimate how long the workers need for the waiting requests. Also adds this gateway's new requests
        to the counts in Redis.
        """
        with redis_errors(), waiting(most=_LOOK_SECONDS):
            waiting_jobs, self._tenants = RunStore(self._redis).queue(self._settings.queue).count_waiting()
            if system.monotonic() - self._read > _SPEED_SECONDS:
                names = listed_workers(self._redis, self._settings.queue)
                by_worker = known_reports(self._redis, names)
                reports = [report for report in by_worker.values() if report]
                self._speed, self.unready = speed(reports), self._why_unready(by_worker)
                self.workers = sum(not report.drained for report in reports)
                if not self._has_scored and (pairs := sum(report.pairs for report in reports)):
                    self._reported = sum(report.tokens for report in reports) / pairs
                self._read = system.monotonic()
            counts = self._counts.copy()
            if counts:
                tell(self._redis, counts)
            self._counts -= counts
        self.backlog_seconds = waiting_jobs * self._tokens_per_job / self._speed if self._speed else 0.0
        metrics.backlog.set(self.backlog_seconds)

    def _why_unready(self, reports: Mapping[str, WorkerReport | None]) -> str | None:
        """Return why a request for the gateway's model would have to wait, for the attribute `unready`."""
        live = {name: report for name, report in reports.items() if not (report and report.drained)}
        if not live:
            return "there is no worker"
        models = {name: report.models if report else () for name, report in live.items()}
        having = {name for name, loaded in models.items() if self._model in map(_without_version, loaded)}
        self._able = (self._able & live.keys()) | having
        return None if self._able else "no worker has loaded the model"


def _without_version(model: str) -> str:
    """Return a model's name without ``@VERSION`` or ``@ALIAS``. Workers report versions, and the settings may
    name an alias.
    """
    return model.partition("@")[0]


def speed(reports: list[WorkerReport]) -> float | None:
    """Return how many tokens all workers together compute in a second, or ``None`` if this is not known.

    The result is the mean speed of the workers that have computed `_ENOUGH_TOKENS` tokens, times the number
    of workers that take work.
    """
    speeds = [
        report.tokens / report.stage_seconds[_FORWARD]
        for report in reports
        if report.tokens >= _ENOUGH_TOKENS and report.stage_seconds[_FORWARD] > 0
    ]
    able = sum(1 for report in reports if not report.drained)
    return able * sum(speeds) / len(speeds) if speeds and able else None
