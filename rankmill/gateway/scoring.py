"""Requests as the gateway understands them, whatever dialect or protocol they come in, and their scores."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankmill.gateway import metrics
from rankmill.gateway.keys.admission import Admission
from rankmill.gateway.keys.api_keys import ApiKey
from rankmill.gateway.refusals import Refusal, refusal_of
from rankmill.jobs.contract.errors import ConfigError, RunFailed
from rankmill.jobs.contract.priority import Priority, choose_priority
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.client.async_client import AsyncClient, AsyncScoringRun

_NO_WORKERS_SECONDS = 15.0

ANY_MODEL = "*"

OF_THE_CALLER = frozenset({"max_length", "instruction"})
"""Fields of a spec with values of the caller's own, which a model may refuse."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    ``queries`` is one text for all passages, or one for each. ``model`` is ``None`` for the gateway's own.
    ``spec`` has other fields of `ScoreSpec` for this request.
    """

    queries: str | Sequence[str]
    passages: Sequence[str]
    model: str | None = None
    spec: Mapping[str, str | int | None] = field(default_factory=dict)

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score, in order."""
        if isinstance(self.queries, str):
            return [(self.queries, passage) for passage in self.passages]
        return list(zip(self.queries, self.passages, strict=True))


@dataclass(frozen=True)
class Scored:
    """Scores of a request, in input order.

    ``tokens`` are those that were computed, without padding. ``created`` is in seconds since 1970,
    ``seconds`` is the time that the scores took, ``work_seconds`` that of the slowest chunk in its worker,
    of which ``tokenize_seconds`` and ``forward_seconds`` are parts (``None``: its worker does not tell, as it
    is of an older release), ``chunks`` their number.
    """

    scores: Sequence[float]
    model: str
    tokens: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0
    tokenize_seconds: float | None = None
    forward_seconds: float | None = None
    chunks: int = 1
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def stages(self) -> dict[str, float]:
        """Where the time went (s): those stages that are known."""
        queue = max(self.seconds - self.work_seconds, 0.0)
        parts = {"tokenize": self.tokenize_seconds, "forward": self.forward_seconds}
        known = {stage: seconds for stage, seconds in parts.items() if seconds is not None}
        return {"queue": queue, "work": self.work_seconds, **known}


class Scoring:
    """Scores requests with the workers of a queue. It belongs to the event loop that uses it first.

    Parameters
    ----------
    settings, redis_url
        The server, the queue, and what every request asks for unless it says otherwise.
    admission
        Lets requests in, and holds callers to the limits of their keys.

    Raises
    ------
    ConfigError
        The settings ask for all outputs of a model: an answer has one score for each text.
    """

    def __init__(self, settings: Settings, redis_url: str, admission: Admission) -> None:
        if settings.all_labels:
            raise ConfigError(
                "all_labels: the gateway gives one score for each text; name an output as label"
            )
        self.settings = settings
        self.admission = admission
        self.client = AsyncClient(redis_url, no_workers_seconds=_NO_WORKERS_SECONDS, settings=settings)

    @property
    def models(self) -> list[str]:
        """Names of the models that requests may ask for, the default first."""
        known = dict.fromkeys([self.settings.model, *self.settings.gateway_models])
        return [model for model in known if model != ANY_MODEL]

    def model(self, asked: str | None) -> str:
        """The model for a request that names one, or none.

        Raises
        ------
        Refusal
            The gateway does not serve it.
        """
        model = asked or self.settings.model
        if model not in self.models and ANY_MODEL not in self.settings.gateway_models:
            raise Refusal(
                "no_model",
                f"there is no model {model!r:.200}; this gateway serves {', '.join(self.models)}",
                param="model",
            )
        return model

    async def score(self, asked: Asked, key: ApiKey | None) -> Scored:
        """Score a request; if its task is cancelled, its run is too.

        Raises
        ------
        Refusal
            The request cannot be scored, or the caller is over a limit.
        """
        async with self.begin(asked, key) as run:
            return await run.scores()

    @asynccontextmanager
    async def begin(self, asked: Asked, key: ApiKey | None) -> AsyncIterator[Run]:
        """Admit a request and submit its pairs; raises as `score`, also from the ``with`` block."""
        model = self.model(asked.model)
        pairs = asked.pairs()
        self._check(asked, pairs)
        try:
            async with self.admission.admitted(key, model, len(pairs)):
                priority = choose_priority(key.priority if key else None, len(pairs))
                run = await self._submitted(pairs, priority=priority, model=model, **asked.spec)
                try:
                    yield Run(run, priority, self.settings.gateway_request_seconds)
                except BaseException:
                    await run.cancel()
                    raise
        except RunFailed as error:
            if OF_THE_CALLER.isdisjoint(asked.spec):
                raise refusal_of(error) from None
            raise Refusal("invalid", f"the options of this request do not fit the model: {error}") from None

    async def _submitted(self, pairs: Sequence[tuple[str, str]], **options: Any) -> AsyncScoringRun:
        """Submit pairs; a server that can be read and takes nothing is not waited for any longer."""
        seconds = self.settings.gateway_request_seconds
        try:
            async with asyncio.timeout(seconds) as timer:
                return await self.client.begin(pairs, **options)
        except TimeoutError:
            if not timer.expired():
                raise
            raise Refusal(
                "unavailable",
                f"the server took nothing for {seconds:g} s, and the gateway's log says why; ask again later",
            ) from None

    def _check(self, asked: Asked, pairs: Sequence[tuple[str, str]]) -> None:
        most = self.settings.gateway_pairs
        if not pairs:
            raise Refusal("empty", "there is nothing to score: the list of texts is empty")
        if len(pairs) > most:
            raise Refusal("too_large", f"{len(pairs):,} pairs are more than the {most:,} of one request")
        length = sum(len(query) + len(passage) for query, passage in pairs)
        if length > (limit := 8 * self.settings.gateway_body_mib << 20):
            raise Refusal(
                "too_large",
                f"the pairs have {length:,} characters, the query counted once for each text, and {limit:,} "
                "are allowed: send fewer texts at a time, or a shorter query",
            )


@dataclass(frozen=True)
class Part:
    """Scores of some rows that follow each other, from row `first` on; NaN for those in `errors`."""

    first: int
    scores: Sequence[float]
    errors: Mapping[int, str]


class Run:
    """A request that was submitted."""

    def __init__(self, run: AsyncScoringRun, priority: Priority, seconds: float) -> None:
        self._run = run
        self._priority = priority
        self._seconds = seconds
        self._began = time.perf_counter()

    async def parts(self) -> AsyncIterator[Part]:
        """The scores of each chunk, in order, as soon as they are there.

        Raises
        ------
        Refusal
            They do not come in time, or the workers cannot score them.
        """
        values: list[float] = []
        first = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for score in self._run:
                    values.append(score)
                    if first + len(values) == self._run.stats.rows:
                        yield Part(first, values, dict(self._run.errors))
                        first, values = first + len(values), []
            if values:
                yield Part(first, values, dict(self._run.errors))
        except TimeoutError:
            raise Refusal("timeout", f"{first} texts were scored when the time was over") from None

    def whole(self, scores: list[float]) -> Scored:
        """The scores of all parts as one.

        Raises
        ------
        Refusal
            A row has no score.
        """
        for row, reason in self._run.errors.items():
            raise Refusal("unscorable", f"text {row} cannot be scored: {reason}")
        stats, seconds = self._run.stats, time.perf_counter() - self._began
        version = (self._run.model, stats.revision or "")
        metrics.by_model.count(version, self._priority, np.array(scores, np.float32), seconds)
        return Scored(
            scores, self._run.model, stats.tokens, seconds, stats.seconds, stats.tokenize_seconds,
            stats.forward_seconds, max(stats.chunks, 1), self._run.id,
        )  # fmt: skip

    async def scores(self) -> Scored:
        """Wait for all scores.

        Raises
        ------
        Refusal
            A row has no score.
        """
        found = await self._run.scores(timeout=self._seconds)
        return self.whole(found.tolist())


def ranked(scores: Sequence[float], top: int | None = None) -> Iterator[tuple[int, float]]:
    """Places in the input and scores, best first; equal scores in input order; the first `top` of them."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return ((place, scores[place]) for place in order[:top])
