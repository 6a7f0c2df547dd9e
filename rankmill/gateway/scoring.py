"""Scoring the requests of all dialects and protocols: which models are served, and a run for each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankmill.gateway import metrics
from rankmill.gateway.keys.admission import Admission
from rankmill.gateway.keys.api_keys import ApiKey
from rankmill.gateway.refusals import Refusal, refusal_of
from rankmill.gateway.score_request import RequestScores, ScoreRequest
from rankmill.jobs.contract.errors import ConfigError, RunFailed
from rankmill.jobs.contract.priority import Priority, choose_priority
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.client.async_client import AsyncClient, AsyncScoringRun

_NO_WORKERS_SECONDS = 15.0

_ANY_MODEL = "*"
"""In the setting ``gateway_models``: requests may name any."""

_OF_THE_CALLER = frozenset({"max_length", "instruction"})
"""Fields of a spec with values of the caller's own, which a model may refuse."""


class ServedModels:
    """The models that requests may ask for, by the names that they use."""

    def __init__(self, settings: Settings) -> None:
        self._default = settings.model
        known = [settings.model, *settings.gateway_models]
        self.names = list(dict.fromkeys(name for name in known if name != _ANY_MODEL))
        self._any = _ANY_MODEL in settings.gateway_models

    def resolve(self, name: str | None) -> str:
        """The model for a request that names one, or none.

        Raises
        ------
        Refusal
            The gateway does not serve it.
        """
        model = name or self._default
        if model not in self.names and not self._any:
            raise Refusal(
                "no_model",
                f"there is no model {model!r:.200}; this gateway serves {', '.join(self.names)}",
                param="model",
            )
        return model


class Scoring:
    """Scores requests with the workers of a queue. It belongs to the event loop that uses it first.

    Parameters
    ----------
    settings, redis_url
        The server, the queue, and what every request asks for unless it says otherwise.
    served, admission
        The models; what lets requests in, and holds callers to the limits of their keys.

    Raises
    ------
    ConfigError
        The settings ask for all outputs of a model: an answer has one score for each text.
    """

    def __init__(
        self, settings: Settings, redis_url: str, served: ServedModels, admission: Admission
    ) -> None:
        if settings.all_labels:
            raise ConfigError(
                "all_labels: the gateway gives one score for each text; name an output as label"
            )
        self.settings = settings
        self.served = served
        self.admission = admission
        self.contracts: dict[str, Mapping[str, str]] = {}
        """How the latest scores of each model in `served` were made, as far as it is known."""
        self.client = AsyncClient(redis_url, no_workers_seconds=_NO_WORKERS_SECONDS, settings=settings)

    async def score(self, request: ScoreRequest, key: ApiKey | None) -> RequestScores:
        """Score a request; if its task is cancelled, its run is too.

        Raises
        ------
        Refusal
            The request cannot be scored, or the caller is over a limit.
        """
        async with self.begin(request, key) as run:
            found = await run.scores()
        if (name := self.served.resolve(request.model)) in self.served.names:
            self.contracts[name] = found.contract
        return found

    @asynccontextmanager
    async def begin(self, request: ScoreRequest, key: ApiKey | None) -> AsyncIterator[SubmittedRequest]:
        """Admit a request and submit its pairs; raises as `score`, also from the ``with`` block."""
        model = self.served.resolve(request.model)
        pairs = request.pairs()
        self._check(pairs)
        try:
            async with self.admission.admitted(key, model, len(pairs)):
                priority = choose_priority(key.priority if key else None, len(pairs))
                run = await self._submitted(pairs, priority=priority, model=model, **request.spec)
                try:
                    yield SubmittedRequest(run, priority, self.settings.gateway_request_seconds)
                except BaseException:
                    await run.cancel()
                    raise
        except RunFailed as error:
            if _OF_THE_CALLER.isdisjoint(request.spec):
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

    def _check(self, pairs: Sequence[tuple[str, str]]) -> None:
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
class RowScores:
    """Scores of some rows that follow each other, from row `first` on; NaN for those in `errors`."""

    first: int
    scores: Sequence[float]
    errors: Mapping[int, str]


class SubmittedRequest:
    """A request that was submitted."""

    def __init__(self, run: AsyncScoringRun, priority: Priority, seconds: float) -> None:
        self._run = run
        self._priority = priority
        self._seconds = seconds
        self._began = time.perf_counter()

    async def chunks(self) -> AsyncIterator[RowScores]:
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
                        yield RowScores(first, values, dict(self._run.errors))
                        first, values = first + len(values), []
            if values:
                yield RowScores(first, values, dict(self._run.errors))
        except TimeoutError:
            raise Refusal("timeout", f"{first} texts were scored when the time was over") from None

    def result(self, scores: list[float]) -> RequestScores:
        """The scores of all chunks together.

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
        return RequestScores(
            scores, self._run.model, stats.tokens, seconds, stats.seconds, stats.tokenize_seconds,
            stats.forward_seconds, max(stats.chunks, 1), stats.contract(), self._run.id,
        )  # fmt: skip

    async def scores(self) -> RequestScores:
        """Wait for all scores.

        Raises
        ------
        Refusal
            A row has no score.
        """
        found = await self._run.scores(timeout=self._seconds)
        return self.result(found.tolist())
