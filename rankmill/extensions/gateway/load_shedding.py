"""Limits how many requests the gateway accepts, and how many may wait for the workers."""

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
from rankmill.extensions.gateway.refusals import Kind, Refusal, kind_of
from rankmill.extensions.gateway.settings import GatewaySettings
from rankmill.extensions.gateway.watch import Outcome, tell
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport, known_reports, listed_workers
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.aio import bridge

_LOOK_SECONDS = 1.0

_SPEED_SECONDS = 5.0
"""Seconds between two reads of the workers' reports, which give their speed."""

_MOST_RETRY = 60

_AT_FIRST = 2048
"""Most pairs in progress until the workers' speed is known; a single request may have more."""

_ENOUGH_TOKENS = 10_000
"""Tokens that a worker must have computed before its speed counts, because its first batches are slow."""

_TOKENS_PER_CHAR, _TOKENS_PER_PAIR = 0.25, 100.0
"""Tokens for each character of English text, and tokens of a pair; used until requests have been scored
here.
"""

_TELLING_CHARS = 50_000
"""If a request with this many characters has more tokens than expected, the next request is expected to have
as many for each character. Scripts other than Latin can have four times as many tokens.
"""

_SHARE = 0.05
"""Least weight of a request in the means over requests."""

_REPORT_SECONDS = 60.0
"""Seconds after a scored request during which its model counts as loaded, although no worker has reported it.
"""

_OUTCOMES: dict[Kind, Outcome] = {
    "overloaded": "overloaded", "backend": "failed", "unavailable": "failed", "timeout": "failed",
}  # fmt: skip
"""The outcome that is counted for each of these kinds of refusals; other kinds are faults of the caller."""

_COUNTS_SECONDS = 60.0
"""Seconds after which counts that Redis could not take are dropped, because only the last minute is shown."""

_FORWARD = STAGES.index("forward")

logger = logging.getLogger(__name__)


class LoadShedder:
    """Admits requests while there is room for them.

    `request` refuses a request before its body is read; `work` refuses it when its pairs are known.

    Parameters
    ----------
    settings
        The limits and the queue.
    client
        A client whose commands wait in the event loop (`LoopRedis`).

    Attributes
    ----------
    requests
        Requests in progress.
    backlog_seconds
        Seconds that the workers need for the requests that wait in the queue.
    workers
        Number of workers of the queue that take work.
    unready
        The reason why requests for the gateway's model would wait, in a line; ``None`` if a worker has had
        the model.
    """

    def __init__(self, settings: Settings, client: redis.Redis) -> None:
        self._settings = settings
        self._own = settings.of(GatewaySettings)
        self._redis: Any = client
        self.requests = 0
        self._pairs_per_job = 1.0
        self._speed: float | None = None
        """Tokens a second of all workers together."""
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._tokens_per_pair = _TOKENS_PER_PAIR
        self._reported: float | None = None
        """Tokens of a pair, as workers report them; used until requests have been scored here."""
        self._has_scored = False
        self._taken = 0
        """Tokens of the requests in progress here, estimated from their characters."""
        self._pairs_taken = 0
        self._tenants: set[str] = set()
        """Tenants whose bulk work waits in the queue, by the digits that `group_of` gives."""
        self._read = -math.inf
        self.backlog_seconds = 0.0
        self.workers = 0
        self.unready: str | None = "the workers have not been looked at yet"
        self._able: set[str] = set()
        """Names of workers that have or had the gateway's model, and so can load it again."""
        self._scored = -math.inf
        """The time when a request with the gateway's model was last scored here."""
        self._counts, self._counts_since = Counter[Outcome](), system.monotonic()
        """Counts of outcomes that are not written to Redis yet, and the time when counting them began."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is in progress, and count its outcome.

        Raises
        ------
        Refusal
            The gateway is ``overloaded``: it has too many requests, or too many wait for the workers.
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
            raise Refusal(
                "overloaded",
                f"{self.requests:,} requests are in progress; send it again later",
                retry_after=1,
            )
        late = self.backlog_seconds - self._own.gateway_backlog_seconds
        if late > 0:
            reason = (
                f"the workers need {math.ceil(self.backlog_seconds):,} s for the requests that wait already; "
                "send it again later"
            )
            raise Refusal("overloaded", reason, retry_after=min(math.ceil(late), _MOST_RETRY))

    @contextmanager
    def work(self, chars: int, pairs: int, priority: Priority, tenant: str) -> Iterator[None]:
        """Count a tenant's request while it is scored, with the number and the characters of its pairs.

        Raises
        ------
        Refusal
            The gateway is ``overloaded``: the workers would need too long for this request and the accepted
            ones.
        """
        tokens = self._tokens_per_char * chars
        if self._reported:
            tokens = max(tokens, self._reported * pairs)
        tokens = math.ceil(tokens)  # because sums of fractions would not return to 0
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
        """Refuse a request if the workers would take too long; a request that waits for no other is never
        refused.

        Until the workers' speed is known, at most `_AT_FIRST` pairs are in progress, or a single request.
        """
        if self._speed is None:
            if self._pairs_taken and self._pairs_taken + pairs > _AT_FIRST:
                raise Refusal(
                    "overloaded",
                    "it is not known yet how fast the workers are; send it again later",
                    retry_after=1,
                )
            return
        taken = max(self._taken / self._speed, self.backlog_seconds)
        own = tokens / self._speed
        late = taken + own - self._own.gateway_backlog_seconds
        if taken and late > 0:
            reason = (
                f"the workers need {math.ceil(taken):,} s for the requests that wait already, and "
                f"{math.ceil(own):,} s for this one; send it again later, or in smaller parts"
            )
            raise Refusal("overloaded", reason, retry_after=min(math.ceil(min(late, taken)), _MOST_RETRY))

    def note(self, chars: int, pairs: int, tokens: int, jobs: int, model: str) -> None:
        """Note a scored request, with the number of its jobs, and with the name that workers have for its
        model.
        """
        if tokens and chars:
            self._has_scored, self._reported = True, None
            more = tokens / chars - self._tokens_per_char
            # fewer tokens than expected tell little, because long texts may have been cut
            share = min(chars / _TELLING_CHARS, 1.0) if more > 0 else 0.0
            self._tokens_per_char += max(share, _SHARE) * more
            self._tokens_per_pair += _SHARE * (tokens / pairs - self._tokens_per_pair)
        if _without_version(model) == _without_version(self._settings.model):
            self._scored, self.unready = system.monotonic(), None
        self._pairs_per_job += _SHARE * (pairs / max(jobs, 1) - self._pairs_per_job)

    async def watch(self) -> None:
        while True:
            try:
                await bridge.run(self.look)
            except (RankmillError, redis.RedisError, OSError) as error:
                logger.debug("the queue cannot be looked at: %s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Estimate how long the workers need for the waiting requests, and write the counts of outcomes to
        Redis.
        """
        if system.monotonic() - self._counts_since > _COUNTS_SECONDS:
            self._counts, self._counts_since = Counter(), system.monotonic()
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
            self._counts, self._counts_since = self._counts - counts, system.monotonic()
        tokens = waiting_jobs * self._pairs_per_job * self._tokens_per_pair
        self.backlog_seconds = tokens / self._speed if self._speed else 0.0
        metrics.backlog.set(self.backlog_seconds)

    def _why_unready(self, reports: Mapping[str, WorkerReport | None]) -> str | None:
        """The reason why requests for the model would wait; ``None`` if a worker is known to have it, or to
        have had it.
        """
        settings = self._settings
        live = {name: report for name, report in reports.items() if not (report and report.drained)}
        if not live:
            return "there is no worker"
        wanted = _without_version(settings.model)
        models = {name: report.models if report else () for name, report in live.items()}
        having = {name for name, loaded in models.items() if wanted in map(_without_version, loaded)}
        self._able = (self._able & live.keys()) | having
        is_known = self._able or system.monotonic() - self._scored < _REPORT_SECONDS
        return None if is_known else "no worker has loaded the model"


def _without_version(model: str) -> str:
    """The name of a model without its version, because workers report the versions of a registry's models."""
    return model.partition("@")[0]


def speed(reports: list[WorkerReport]) -> float | None:
    """Tokens a second of all workers together; a worker that has scored only a few tokens counts as fast as
    the others. ``None`` if the speed of no worker is known, or all are drained.
    """
    speeds = [
        report.tokens / report.stage_seconds[_FORWARD]
        for report in reports
        if report.tokens >= _ENOUGH_TOKENS and report.stage_seconds[_FORWARD] > 0
    ]
    able = sum(1 for report in reports if not report.drained)
    return able * sum(speeds) / len(speeds) if speeds and able else None
