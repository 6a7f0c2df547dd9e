"""Fake clients, which need no workers, server or torch, for the tests of services that use rankmill.

Fake clients are the real clients with a store of runs in this process; `FakeWorkers` scores the runs. So
inputs, options, errors, order, timeouts and handles are the real ones.

>>> client = FakeClient()
>>> client.rank("how far is the moon", ["Cheese.", "The moon is 384,400 km away."])[0].index
1
>>> client.score([("a query", None)]).errors
{0: 'passage is null'}

A function can give other scores, and workers can be away or late:

>>> workers = FakeWorkers(lambda query, passage: -len(passage))
>>> FakeClient(fake_workers=workers).score([("q", "four")]).tolist()
[-4.0]
>>> workers.seconds = 60.0
>>> FakeClient(fake_workers=workers).score([("q", "four")], timeout=0.01)
Traceback (most recent call last):
rankmill.jobs.contract.errors.RunTimeout: run ...: 0 rows were done when the time was over; ...
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias, Unpack
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.jobs.contract.errors import ConfigError, RunFailed, SpecError
from rankmill.jobs.contract.file_run import FileRunState, RunOutcome
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.keys import ChunkId, parent_of
from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats
from rankmill.jobs.contract.run import Run, Settled
from rankmill.jobs.contract.spec import OPEN_PRECISIONS, ScoreSpec, choose_output
from rankmill.jobs.contract.wire import as_arrow, decode_rows, names_of_texts, text_fault
from rankmill.jobs.protocol.accounts import Accountant
from rankmill.jobs.protocol.queues import QueueCapacity
from rankmill.jobs.protocol.runs import Deleted, DetachedChunks, RunStore
from rankmill.jobs.protocol.worker_report import QueueWorkers
from rankmill.jobs.runtime.settings import Settings, SettingsOptions
from rankmill.jobs.system import system
from rankmill.producer.client.aio import bridge
from rankmill.producer.client.async_client import AsyncClient, LoopClient, LoopStore
from rankmill.producer.client.sync_client import Client, settings_of

Scoring: TypeAlias = Callable[..., float | Sequence[float] | str]
"""The type of ``score`` of `FakeWorkers`: a function of a row's texts.

The function returns the row's score, the row's several scores, or the reason why the row has no score.
"""

URL = "redis://fake.invalid:6379/0"
"""URL of a server that does not exist, for code that asks a client for its URL."""

_LOOK_SECONDS = 0.005
_MOST_TOKENS = 512

_WORD = re.compile(r"\w+")


def shared_words(*texts: Any) -> float:
    """Return the share of the query's words that the passage has, from 0 to 1.

    A tiny number that depends on the texts is added, so that different pairs seldom have equal scores. For a
    text or a conversation, the result is a number from 0 to 1 that depends on the characters.
    """
    if len(texts) == 1:
        return _by_chance(*texts)
    query, passage = (set(_WORD.findall(text.lower())) for text in texts)
    return len(query & passage) / max(len(query), 1) + _by_chance(*texts) / 1000


def _by_chance(*texts: Any) -> float:
    return zlib.crc32(json.dumps(texts).encode()) / 2**32


@dataclass
class FakeRun:
    """A run that was submitted to `FakeWorkers`.

    Attributes
    ----------
    asked
        The run itself, with its spec, rows, priority and queue.
    is_complete
        Whether all scores of the run were collected.
    is_cancelled
        Whether the run was cancelled or failed before it was complete.
    """

    asked: Run
    is_complete: bool = False
    is_cancelled: bool = False
    _chunks: DetachedChunks | None = None
    _payloads: dict[ChunkId, Payload] = field(default_factory=dict)
    _waiting: dict[ChunkId, float] = field(default_factory=dict)
    _results: dict[int, ChunkResult] = field(default_factory=dict)
    _entries: Iterator[int] = field(default_factory=lambda: count(1))


class FakeWorkers:
    """Scores the runs of fake clients, in place of workers and their server.

    All attributes may be changed at any time.

    Parameters
    ----------
    score
        A function that gets the texts of a row: a query and a passage, or a single text, or the messages of a
        conversation as a list. It returns the score, or a text with the reason why the row has no score. If
        the function raises `RunFailed`, the run fails. The default is `shared_words`; with `labels`, the
        default returns a number from 0 to 1 for each label.
    labels
        Names of the model's outputs, if it has several; `score` returns a number for each.
    count
        Number of workers. With 0, nothing is scored: a wait ends with `RunTimeout` after its timeout, or with
        `NoWorkers` after ``no_workers_seconds``.
    seconds
        Seconds that a chunk takes.

    Attributes
    ----------
    runs
        The submitted runs in order, except runs of files.
    files
        The runs of files that were submitted, by id; `end_file` ends them.
    """

    def __init__(
        self,
        score: Scoring = shared_words,
        *,
        labels: Sequence[str] = (),
        count: int = 1,
        seconds: float = 0.0,
    ) -> None:
        self.score, self.labels, self.count, self.seconds = score, tuple(labels), count, seconds
        self.runs: list[FakeRun] = []
        self.files: dict[str, FileRunState] = {}
        self._known: dict[str, FakeRun] = {}
        self._told: set[str] = set()
        """Ids of cancelled runs whose clients must learn of the cancellation (`RunStore.was_cancelled`)."""
        self._lock = system.RLock()

    @contextmanager
    def everywhere(self) -> Iterator[FakeWorkers]:
        """Score for all clients that any code makes within the ``with`` block.

        `CrossEncoder` and embedded clients are included. If the variable ``REDIS_URL`` is not set, then
        within the block it has the URL of a server that does not exist.
        """

        def alone(kind: type[Client], /, *, settings: Settings | None = None, **options: Any) -> Client:
            return kind(URL, no_workers_seconds=None, settings=settings_of(settings, options))

        def shared(kind: type[Client], settings: Settings) -> Client:
            return alone(kind, settings=settings)

        names_server = "REDIS_URL" in os.environ
        with (
            patch.object(Client, "_store_at", lambda *_: _Store(self)),
            patch.object(LoopClient, "_store_at", lambda *_: _LoopStore(self)),
            patch.object(Client, "embedded", classmethod(alone)),
            patch.object(Client, "_shared", classmethod(shared)),
        ):
            os.environ.setdefault("REDIS_URL", URL)
            try:
                yield self
            finally:
                if not names_server:
                    os.environ.pop("REDIS_URL", None)

    def end_file(self, run_id: str, reason: str = "", *, rows: int = 0, row_errors: int = 0) -> None:
        """End a submitted run of files. With a `reason`, the run has failed; without one, it is done."""
        run = self.files[run_id]
        outcome = RunOutcome(
            output=run.order.request.output or "", rows=rows, row_errors=row_errors, resumed_rows=0,
            errors_file=None, seconds=0.0, model=run.order.spec.model, revision=None,
            precision="fp32", retries=0,
        )  # fmt: skip
        done = run if reason else run.changed(rows=rows, outcome=outcome)
        self.files[run_id] = done.end("failed" if reason else "done", reason)

    def _begin(self, run: Run) -> None:
        with self._lock:
            if run.id not in self._known:
                self._known[run.id] = FakeRun(run)
                self.runs.append(self._known[run.id])

    def _find(self, run_id: str) -> FakeRun | None:
        run = self._known.get(run_id)
        return run if run and system.now() < run.asked.created + run.asked.ttl else None

    def _end(self, run: Run, *, left: bool, tell: bool) -> int:
        """Forget a run, and return how many of its chunks had no result.

        Parameters
        ----------
        run
            The run.
        left
            Whether the run is cancelled; if not, it is complete.
        tell
            Whether clients that collect the run's results learn that it was cancelled.
        """
        with self._lock:
            fake_run = self._known.pop(run.id, None)
            if fake_run is None:
                return 0
            waiting = len(fake_run._waiting)
            fake_run.is_cancelled, fake_run.is_complete = left, not left
            self._told |= {run.id} if tell else set()
            fake_run._payloads, fake_run._waiting, fake_run._results = {}, {}, {}
            return waiting

    @property
    def _names(self) -> list[str]:
        return [f"fake-{number}" for number in range(1, self.count + 1)]

    def _collect(self, run: FakeRun, after: int) -> list[tuple[str, ChunkResult]]:
        """Score the run's chunks that have waited for ``seconds``, and return its results with their numbers.

        Only results whose numbers are greater than `after` are returned.
        """
        latest = system.monotonic() - self.seconds
        due = [chunk for chunk, since in list(run._waiting.items()) if self.count and since <= latest]
        for chunk in due:
            if payload := run._payloads.get(chunk):
                result = self._scored(run.asked, chunk, payload)
                with self._lock:
                    if run._waiting.pop(chunk, None) is not None:
                        run._results[next(run._entries)] = result
        with self._lock:
            return [(str(entry), result) for entry, result in run._results.items() if entry > after]

    def _scored(self, run: Run, chunk: ChunkId, payload: Payload) -> ChunkResult:
        names, spec = self._names, run.spec
        rows = list(zip(*decode_rows(payload.pairs, run.inputs), strict=True))
        called = names_of_texts(run.inputs)
        faults = [text_fault(dict(zip(called, texts, strict=True))) for texts in rows]
        reasons = [fault and fault[1] for fault in faults]
        sizes = [sum(len(_WORD.findall(text or "")) for text in texts) for texts in rows]
        worker, tokens_found, labels = names[parent_of(chunk) % len(names)], list[str](), tuple[str, ...]()
        try:
            if run.inputs == "tokens":
                tokens_found = [self._found(texts[0] or "").model_dump_json() for texts in rows]
                scores = np.array(sizes, np.float32)
            else:
                labels, scores = self._scores(spec, rows, reasons)
        except (RunFailed, SpecError) as error:
            why = str(error)
            return ChunkFailure(chunk=chunk, message=why, fatal=True, worker=worker, option=error.option)
        missing = np.array([reason is not None for reason in reasons])
        tokens = None
        if tokens_found:
            tokens = pa.array(tokens_found, pa.string(), mask=missing)
        elif payload.row_tokens:
            tokens = pa.array(sizes, pa.int32(), mask=missing)
        return ChunkScores(
            chunk=chunk,
            scores=as_arrow(scores, missing),
            errors=pa.array(reasons, pa.string()),
            stats=ChunkStats(
                worker=worker, device="cpu", device_name="fake", backend="fake",
                precision="fp32" if spec.precision in OPEN_PRECISIONS else spec.precision,
                revision=spec.revision, attempt=1, tokens=sum(sizes), padded_tokens=sum(sizes), batches=1,
                seconds=0.0, labels=labels,
            ),
            tokens=tokens,
        )  # fmt: skip

    def _scores(
        self, spec: ScoreSpec, rows: Sequence[Sequence[str | None]], reasons: list[str | None]
    ) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
        """Return the labels and the scores of the rows. If each row has one score, there are no labels.

        If a row gets no score, the reason is written into `reasons`.
        """
        several = max(len(self.labels), 1)
        logits = np.zeros((len(rows), several), np.float32)
        for row, texts in enumerate(rows):
            if reasons[row] is None:
                given = self._one(texts if spec.inputs != "conversations" else [json.loads(texts[0] or "")])
                if isinstance(given, str):
                    reasons[row] = given
                    continue
                wanted = (len(self.labels),) if self.labels else ()
                if given is None or np.shape(given) != wanted:
                    numbers = f"{len(self.labels)} numbers" if self.labels else "a number"
                    raise ConfigError(f"score: it returns {given!r:.80}, and not {numbers} or a text")
                if not np.isfinite(given).all():
                    reasons[row] = "the model's output is not a number in fp32"
                else:
                    logits[row] = given
        scores = _activated(logits, spec)
        if spec.all_labels and several > 1:
            return self.labels, scores
        chosen = choose_output(spec.label, self.labels or ("LABEL_0",), spec.model)
        return (), scores[:, chosen or 0]

    def _one(self, texts: Sequence[Any]) -> float | Sequence[float] | str:
        if self.labels and self.score is shared_words:
            return [_by_chance(*texts, label) for label in self.labels]
        return self.score(*texts)

    def _found(self, row: str) -> TokensFound:
        """Answer a request for the model's limit and labels. Raises `RunFailed` if tokens are asked for."""
        if not TokensAsked.read_json(row, "what is asked for").about:
            raise RunFailed("fake workers do not answer what tokens a text has")
        return TokensFound(
            text="", ids=(), words=(), special=(), spans=(), most=_MOST_TOKENS,
            labels=self.labels or ("LABEL_0",),
        )  # fmt: skip


def _activated(logits: npt.NDArray[np.float32], spec: ScoreSpec) -> npt.NDArray[np.float32]:
    """Apply the spec's activation to logits ``[n, outputs]``. The fake model's own activation is the
    identity.
    """
    several = logits.shape[1] > 1
    if spec.activation == "softmax" and not several:
        why = f"activation softmax is for several outputs, and model {spec.model} has one"
        raise SpecError(why, option="activation")
    activated: npt.NDArray[np.floating[Any]] = logits
    if spec.activation == "sigmoid" or (spec.activation == "probability" and not several):
        activated = 1 / (1 + np.exp(-logits))
    elif spec.activation in {"softmax", "probability"}:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        activated = powers / powers.sum(axis=1, keepdims=True)
    return activated.astype(np.float32)


class _Store(RunStore):
    """A store of runs in this process, with the methods that clients call on `RunStore`."""

    server_kind = "fake"

    def __init__(self, workers: FakeWorkers) -> None:
        self.redis = None
        self.files = workers.files
        self.accountant = Accountant()
        self._workers = workers

    def close(self) -> None:
        pass

    def durability(self) -> None:
        return None

    def refusal(self) -> None:
        return None

    def suspended(self) -> bool:
        return False

    def workers(self, queue: str) -> QueueWorkers:
        return QueueWorkers(scoring=frozenset(self._workers._names), other=frozenset())

    def capacity(self, queue: str) -> QueueCapacity:
        return QueueCapacity(workers=self._workers.count)

    def restore(self, run: Run) -> None:
        if not self.was_cancelled(run):
            self._workers._begin(run)

    def load(self, run_id: str) -> Run | None:
        run = self._workers._find(run_id)
        return run.asked if run else None

    def exists(self, run_id: str) -> bool:
        return self._workers._find(run_id) is not None

    def was_cancelled(self, run: Run) -> bool:
        return run.id in self._workers._told

    def settle(self, run: Run, mine: Settled, *, over: bool = False) -> Settled:
        return mine

    def enqueue(self, run: Run, payloads: Mapping[ChunkId, Payload], *, new: bool = False) -> None:
        if new:
            self.restore(run)
        if fake_run := self._workers._find(run.id):
            fake_run._payloads |= payloads
            fake_run._waiting |= dict.fromkeys(payloads, system.monotonic())

    def payload(self, run: Run, chunk: ChunkId) -> bytes | None:
        fake_run = self._workers._find(run.id)
        return fake_run._payloads[chunk].pairs if fake_run and chunk in fake_run._payloads else None

    def write_chunks(self, run: Run, chunks: DetachedChunks) -> None:
        if fake_run := self._workers._find(run.id):
            fake_run._chunks = chunks

    def detached_chunks(self, run_id: str) -> DetachedChunks | None:
        run = self._workers._find(run_id)
        return run._chunks if run else None

    def failed_attempts(self, run: Run) -> Mapping[ChunkId, int]:
        return {}

    def results(self, run: Run, *, block_ms: int, after: str = "0", **_: Any) -> Any:
        until = system.monotonic() + block_ms / 1000
        while fake_run := self._workers._find(run.id):
            results = self._workers._collect(fake_run, int(after))
            seconds_left = until - system.monotonic()
            if results or seconds_left <= 0:
                return results
            self._pause(min(seconds_left, _LOOK_SECONDS))
        return []

    def _pause(self, seconds: float) -> None:
        system.sleep(seconds)

    def forget(self, run: Run, chunks: Iterable[ChunkId], entries: Iterable[str], *_: Any, **__: Any) -> None:
        if fake_run := self._workers._find(run.id):
            for chunk in chunks:
                fake_run._payloads.pop(chunk, None)
            for entry in entries:
                fake_run._results.pop(int(entry), None)

    def note(self, *_: Any, **__: Any) -> None:
        pass

    def unlist(self, run: Run) -> None:
        pass

    def missing(self, run: Run, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        return []

    def put_back(self, run: Run, chunks: Iterable[ChunkId]) -> int:
        return 0

    def wrong(self, run_ids: Iterable[str]) -> None:
        return None

    def delete(self, run: Run, chunks: Iterable[ChunkId], *, tell: bool = False, **_: Any) -> Deleted:
        return Deleted(self._workers._end(run, left=tell or bool(list(chunks)), tell=tell), None)


class _LoopStore(_Store, LoopStore):
    def __init__(self, workers: FakeWorkers) -> None:
        super().__init__(workers)
        self._background = set()

    @property
    def patrol_seconds(self) -> float:
        return 0.2

    async def probe(self) -> None:
        pass

    async def end(self) -> None:
        pass

    def _pause(self, seconds: float) -> None:
        bridge.wait(asyncio.sleep(seconds))


class _WithFakeWorkers:
    def __init__(
        self,
        redis_url: str | None = None,
        *,
        fake_workers: FakeWorkers | None = None,
        no_workers_seconds: float | None = 60.0,
        settings: Settings | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        self.fake_workers = fake_workers or FakeWorkers()
        super().__init__(  # type: ignore[call-arg, misc]
            redis_url or URL, no_workers_seconds=no_workers_seconds, settings=settings, **options
        )


class FakeClient(_WithFakeWorkers, Client):
    """A `Client` without a server. Its runs are scored by `fake_workers`, which several clients may share.

    The parameters are those of `Client`; the URL of a server may be left out.
    """

    @classmethod
    def embedded(cls, *, settings: Settings | None = None, **options: Unpack[SettingsOptions]) -> Client:
        return cls(no_workers_seconds=None, settings=settings_of(settings, options))

    def _store_at(self, url: str) -> RunStore:
        return _Store(self.fake_workers)


class _FakeLoopClient(LoopClient):
    def __init__(self, redis_url: str | None, *, fake_workers: FakeWorkers, **options: Any) -> None:
        self.fake_workers = fake_workers
        super().__init__(redis_url, **options)

    def _store_at(self, url: str) -> LoopStore:
        return _LoopStore(self.fake_workers)


class FakeAsyncClient(_WithFakeWorkers, AsyncClient):
    """An `AsyncClient` without a server; see `FakeClient`."""

    def _loop_client(self, redis_url: str | None, **options: Any) -> LoopClient:
        return _FakeLoopClient(redis_url, fake_workers=self.fake_workers, **options)


if "pytest" in sys.modules:  # pytest is slow to import, and its users have imported it
    import pytest

    @pytest.fixture
    def fake_workers() -> Iterator[FakeWorkers]:
        """Workers for all clients that a test makes, including those of the service under test."""
        with FakeWorkers().everywhere() as workers:
            yield workers
