"""Scores the requests of all dialects and protocols; each request becomes a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.keys.admission import MOST_WAIT, Admission
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.load_shedding import LoadShedder
from rankmill.extensions.gateway.refusals import Refusal, refusal_of, row_reason, unscorable
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest, encoding, within
from rankmill.extensions.gateway.settings import GatewaySettings, name_and_model
from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.jobs.contract.errors import ConfigError, InputError, RunFailed, StillWaiting
from rankmill.jobs.contract.home import model_of_run
from rankmill.jobs.contract.priority import Priority, Tenant, choose_priority, group_of
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.async_client import AsyncClient, AsyncScoringRun

_NO_WORKERS_SECONDS = 15.0

_ABOUT_SECONDS = 60.0

_ANY_MODEL = "*"
"""The entry of the setting ``gateway_models`` that lets requests name any model."""

_OF_THE_CALLER = frozenset({"max_length", "instruction", "max_passage_tokens"})
"""Fields of a spec whose values may not fit the model. If a run fails because of a field that the request has
set, the error is the caller's.
"""


class ServedModel(NamedTuple):
    """A model of the gateway. ``name`` is its name for callers, ``model`` its name for workers, and ``given``
    its name in the settings, such as ``./trained``. Callers and API keys may use any of the three names.
    """

    name: str
    model: str
    given: str = ""


class ServedModels:
    """The models that requests may ask for.

    The entries of the setting ``gateway_models`` give them names for callers:

    - ``fast=org/model`` has the name ``fast``.
    - ``org/model`` has the name ``org/model``.
    - ``/data/model``, a directory, has the name ``model``.

    Raises
    ------
    ConfigError
        Two models have the same name.
    """

    def __init__(self, settings: Settings) -> None:
        entries = settings.of(GatewaySettings).gateway_models
        self._any = _ANY_MODEL in entries
        models = [_served(entry) for entry in entries if entry != _ANY_MODEL]
        own = model_of_run(settings.model)
        if own not in {model.model for model in models}:
            models.insert(0, _served(settings.model))
        models.sort(key=lambda model: model.model != own)  # the default model comes first
        self._named: dict[str, ServedModel] = {}
        for model in models:
            other = self._named.setdefault(model.name, model)
            if other.model != model.model:
                both = f"{other.model} and {model.model} would both be called {model.name}"
                raise ConfigError(f"gateway_models: {both}; give one another name: NAME=MODEL")
        self._by_model = {
            key: self._named[model.name] for model in reversed(models) for key in (model.given, model.model)
        }
        self.default = models[0]

    @property
    def all(self) -> list[ServedModel]:
        """All models that this gateway serves, with the default model first."""
        return list(self._named.values())

    def resolve(self, name: str | None) -> ServedModel:
        """Find the model that a request names; without a name, return the default model.

        Raises
        ------
        Refusal
            The gateway does not serve the model.
        """
        if not name:
            return self.default
        model = self._find(name)
        if model is None and not self._any:
            why = f"there is no model {name!r:.200}; this gateway serves {', '.join(self._named)}"
            raise Refusal("no_model", why, param="model")
        return model or ServedModel(name, model_of_run(name))

    def public(self, model: str) -> str:
        """Return the name that callers use for a model, even if the gateway does not serve it.

        Parameters
        ----------
        model
            The model's name for workers.
        """
        return (self._by_model.get(model) or _served(model)).name

    def known(self, name: str) -> str:
        """Return the name that workers use for a model. An unknown name is returned as it is.

        Parameters
        ----------
        name
            A name that callers may use for the model.
        """
        model = self._find(name)
        return model.model if model else name

    def _find(self, name: str) -> ServedModel | None:
        return self._named.get(name) or self._by_model.get(name)


def _served(entry: str) -> ServedModel:
    name, model = name_and_model(entry)
    # If the model is a directory, callers see only the last part of its path.
    is_path = entry.startswith(("/", "./", "../", "~"))
    own = entry.rstrip("/").rpartition("/")[2] if is_path else entry
    return ServedModel(name or own, model_of_run(model), model)


@dataclass(eq=False)
class Scoring:
    """Scores requests with the workers of a queue. Use a `Scoring` in one event loop only.

    Attributes
    ----------
    settings
        The gateway's settings, such as the queue and the defaults of requests.
    redis_url
        URL of the Redis server.
    served
        The models that requests may name.
    admission
        The limits of API keys.
    load
        The limits on the work that waits.
    contracts
        How the latest scores of each served model were made, such as their precision. The keys are the
        models' names for workers. Only `score` updates this.

    Raises
    ------
    ConfigError
        The setting ``all_labels`` is true; only a request can ask for all labels.
    """

    settings: Settings
    redis_url: str
    served: ServedModels
    admission: Admission
    load: LoadShedder
    contracts: dict[str, Mapping[str, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.settings.all_labels:
            why = "all_labels: the gateway gives one score for each text; name an output as label"
            raise ConfigError(why)
        self._own = self.settings.of(GatewaySettings)
        self._about: asyncio.Task[TokensFound] | None = None
        self._asked = 0.0
        self.client = AsyncClient(
            self.redis_url, no_workers_seconds=_NO_WORKERS_SECONDS, settings=self.settings
        )

    async def about_model(self) -> TokensFound:
        """Ask a worker about the gateway's model: its labels, and how many tokens a row may have.

        All callers share one question, and its answer is kept for a minute.

        Raises
        ------
        Refusal, RankmillError
            No worker answers. The errors are those of `score`.
        """
        about = self._about
        is_old = system.monotonic() - self._asked > _ABOUT_SECONDS
        if about is None or (about.done() and (is_old or about.cancelled() or about.exception())):
            self._about = about = asyncio.create_task(self._ask_about_model())
            self._asked = system.monotonic()
        return await asyncio.shield(about)

    async def _ask_about_model(self) -> TokensFound:
        request = encoding([TokensAsked(text="", special=False, about=True)])
        (found,) = (await self.score(request, None)).found
        return found

    async def score(self, request: ScoreRequest, key: ApiKey | None) -> RequestScores:
        """Score a request. If the scoring fails or its task is cancelled, the request's run is cancelled,
        too.

        Raises
        ------
        Refusal
            The request cannot be scored, or the caller is over a limit.
        RankmillError
            The scores do not arrive in time, or the workers or the server are away for too long.
        """
        async with self.begin(request, key) as run:
            scores = await run.scores()
        served = self.served.resolve(request.model)
        if served in self.served.all:
            self.contracts[served.model] = scores.contract
        return scores

    @asynccontextmanager
    async def begin(self, request: ScoreRequest, key: ApiKey | None) -> AsyncIterator[SubmittedRequest]:
        """Admit a request, submit its rows as a run, and yield the submitted request.

        If the ``with`` block fails, the run is cancelled. The errors are those of `score`.
        """
        served = self.served.resolve(request.model)
        spec: dict[str, Any] = within(self.settings, served.model, request.spec)
        rows = request.rows()
        chars = self._check(rows)
        given: Sequence[Any] = rows if request.queries is not None else request.passages
        own = self.settings.tenant, self.settings.weight
        tenant = Tenant(key.name, key.weight) if key else Tenant(*own)
        priority = choose_priority(key.priority if key else None, len(rows))
        try:
            with self.load.work(chars, len(rows), priority, group_of(tenant.name)):
                await self.admission.take(key, served, len(rows))
                began = time.perf_counter()
                with waiting(most=MOST_WAIT):  # the longest wait for a Redis server that cannot serve
                    run = await self.client.begin(given, priority=priority, tenant=tenant, **spec)
                try:
                    shown = served.name if served.name != served.model else None
                    yield SubmittedRequest(
                        run, priority, self._own.gateway_request_seconds, shown, began,
                        encodes=spec["inputs"] == "tokens",
                    )  # fmt: skip
                except BaseException as error:
                    await run.cancel()
                    if isinstance(error, StillWaiting):
                        raise error.of_a_cancelled_run() from None
                    raise
            self.load.note(chars, run.stats.tokens, run.stats.chunks)
        except RunFailed as error:
            named = {name for name in _OF_THE_CALLER if spec.get(name) is not None}
            if error.option not in {"inputs", *named}:
                raise refusal_of(error) from None
            asks = InputError(f"the options of this request do not fit the model: {error}")
            refusal = refusal_of(asks, {served.model: served.name} if "/" in served.model else {})
            param = None if error.option == "inputs" else error.option
            raise Refusal("invalid", refusal.message, param=param) from None

    def _check(self, rows: Sequence[tuple[str, ...]]) -> int:
        """Return the number of characters of a request's rows. Raises `Refusal` if the request has no rows,
        too many rows, or too many characters.
        """
        most = self._own.gateway_pairs
        if not rows:
            raise Refusal("empty", "there is nothing to score: the list of texts is empty")
        if len(rows) > most:
            why = f"{len(rows):,} pairs are more than the {most:,} of one request: send fewer at a time"
            raise Refusal("too_large", why)
        length = sum(len(text) for row in rows for text in row)
        if length > (limit := 8 * self._own.gateway_body_mib << 20):
            raise Refusal(
                "too_large",
                f"the pairs have {length:,} characters, the query counted once for each text, and {limit:,} "
                "are allowed: send fewer texts at a time, or a shorter query",
            )
        return length


@dataclass(frozen=True)
class SubmittedRequest:
    """Waits for the scores of a submitted request.

    Attributes
    ----------
    run, priority
        The run of the request, and its priority.
    seconds
        The scores must arrive within this many seconds.
    name
        The model's name in the answer. With ``None``, the answer has the run's name for the model: if the
        request named the alias ``m@best``, this is the version ``m@2``.
    began
        The time of submission, by `time.perf_counter`.
    encodes
        Whether the request asks for tokens, not for scores.
    """

    run: AsyncScoringRun
    priority: Priority
    seconds: float
    name: str | None
    began: float
    encodes: bool = False

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the scores of the rows in order, a chunk at a time, as soon as they arrive.

        A chunk is a JSON object. ``first`` is the number of its first row. ``scores`` has the scores, with
        null for a row without one. ``errors`` has the reason for each row without a score, by the row's
        number.

        Raises
        ------
        Refusal
            The scores do not arrive in time.
        RankmillError
            The run fails, or the workers or the server are away for too long.
        """
        values: list[Any] = []
        first = 0
        scores = aiter(self.run)
        end = asyncio.get_running_loop().time() + self.seconds
        try:
            while True:
                # Do not include the `yield`: a timeout would cancel the caller, which may be sending to a
                # client.
                async with asyncio.timeout_at(end):
                    async for score in scores:
                        values.append(score)
                        if first + len(values) == self.run.stats.rows:
                            break
                if not values:
                    break
                reasons = self.run.errors.items()
                errors = {str(row): row_reason(reason) for row, reason in reasons if row >= first}
                known = [None if str(row) in errors else score for row, score in enumerate(values, first)]
                yield {"first": first, "scores": known, "errors": errors}
                first, values = first + len(values), []
        except TimeoutError:
            raise Refusal(
                "timeout",
                f"{first + len(values)} texts were scored after {self.seconds:g} s, the most of a request; "
                "the run is cancelled: send fewer texts at a time",
            ) from None

    def result(self, scores: list[Any]) -> RequestScores:
        """Make the result of the request from the `scores` of all its rows, in order. Also adds the scores to
        the metrics of the model's versions.

        Raises
        ------
        Refusal
            A row has no score, or lacks the tokens that were asked for.
        """
        for row, reason in self.run.errors.items():
            raise unscorable(row, reason)
        stats, seconds = self.run.stats, time.perf_counter() - self.began
        labels, array = self.run.labels, np.array(scores, np.float32)
        versions = self.run.versions
        for model, revision, rows in [] if self.encodes else versions:
            version = model, revision or ""
            metrics.by_model.count(version, self.priority, array[rows], seconds, max(len(labels), 1))
        revisions = [revision for _, revision, _ in versions if revision]
        contract = {**stats.contract(), **({"revision": ",".join(revisions)} if revisions else {})}
        return RequestScores(
            scores, self.name or self.run.model, stats.tokens, seconds, stats.seconds,
            stats.tokenize_seconds, stats.forward_seconds, contract, labels, self._found(), self.run.id,
        )  # fmt: skip

    def _found(self) -> list[TokensFound]:
        """Return the workers' answers to rows that ask for tokens; empty if the request asks for scores."""
        rows = [row for row in self.run.found if row is not None]
        if self.encodes and len(rows) != self.run.stats.rows:
            raise Refusal("backend", "a worker has answered without the tokens that were asked for")
        return [TokensFound.read_json(raw, f"what was found of text {row}") for row, raw in enumerate(rows)]

    async def scores(self) -> RequestScores:
        """Wait for all scores of the request, and return its result.

        Raises
        ------
        Refusal
            A row has no score, or lacks the tokens that were asked for.
        RankmillError
            The run fails, the scores do not arrive in time, or the workers or the server are away for too
            long.
        """
        result = await self.run.scores(timeout=self.seconds)
        return self.result(result.tolist())
