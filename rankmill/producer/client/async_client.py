"""AsyncClient, which has the calls of `Client` as coroutines for asyncio.

>>> async with AsyncClient("redis://localhost:6379/0") as client:                        # doctest: +SKIP
...     best = await client.rank("how far is the moon", ["Cheese.", "About 384,000 km."])
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import update_wrapper
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import redis

from rankmill.jobs.contract.errors import ConfigError, RunTimeout
from rankmill.jobs.model_names import Choice, ModelNames
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.connection import check_mode, connection_failed
from rankmill.jobs.system import system
from rankmill.producer.client.aio import bridge
from rankmill.producer.client.aio.connection import LoopRedis
from rankmill.producer.client.runs import RowScore, ScoringRun
from rankmill.producer.client.sync_client import Client

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rankmill.jobs.contract.run import Progress
    from rankmill.jobs.runtime.settings import Settings, SettingsOptions
    from rankmill.producer.client.files import AsyncFileHandle, FileHandle
    from rankmill.producer.client.runs import RunStats, Scores
    from rankmill.producer.client.sync_client import SubmitOptions
    from rankmill.producer.collect.pairs import Pairs


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_PROBE_SECONDS = 5
_PATROL_SECONDS = 0.2
_PATROL_SECONDS_PER_RUN = 0.01
"""The pause between two checks of a waiting run is at least this many seconds times the number of waiting
runs, and at least `_PATROL_SECONDS`.
"""

_BEGINNING = 32
"""At most this many runs of a client are encoded and sent at the same time; further runs wait. Without this
bound, a client with a thousand new runs would encode all of them before it sends the first.
"""

_SMALL_ROWS = 256
"""Up to this many rows are encoded in the event loop. More rows are encoded in a thread, so that other tasks
continue meanwhile.
"""


class LoopStore(RunStore):
    """Reads and writes the state of runs in Redis, as `RunStore` does, for code that `bridge.run` calls in an
    event loop.
    """

    def __init__(self, client: LoopRedis) -> None:
        super().__init__(client)
        self._streams = client.streams
        self._background: set[asyncio.Task[None]] = set()

    async def probe(self) -> None:
        """Send a PING to the Redis server. Raises redis-py's error if the server does not answer, and
        `ConfigError` if it is in cluster mode.
        """
        await self.redis.loop_client.execute_command("PING")
        await bridge.run(check_mode, self.redis)

    async def end(self) -> None:
        await self.redis.streams.close()
        await self.redis.line.close()
        await self.redis.loop_client.aclose()

    @property
    def patrol_seconds(self) -> float:
        return max(_PATROL_SECONDS, _PATROL_SECONDS_PER_RUN * len(self._streams))

    def compute(self, do: Callable[[], T], rows: int) -> T:
        return do() if rows <= _SMALL_ROWS else bridge.wait(asyncio.to_thread(do))

    def later(self, do: Callable[[], None]) -> None:
        task = asyncio.create_task(bridge.run(do))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _LoopNames(ModelNames):
    """Finds the model that a name, such as an alias, stands for. Slow look-ups run in a thread, so that the
    event loop continues.
    """

    def choice(self, model: str) -> Choice | None:
        if self.answers_at_once(model):
            return super().choice(model)
        return bridge.wait(asyncio.to_thread(super().choice, model))


class LoopClient(Client):
    """A `Client` for asyncio: `bridge.run` calls its methods, which wait for Redis in the event loop."""

    _names_class = _LoopNames
    store: LoopStore

    def _store_at(self, url: str) -> LoopStore:
        return LoopStore(LoopRedis(url, self.settings.redis_wait_seconds))

    def _opened(self) -> None:
        # Do not ask the server here, because there may be no event loop yet: `AsyncClient._open` asks it
        # later.
        self._beginning = asyncio.Semaphore(_BEGINNING)

    def start(self, *args: Any, deadline: float = math.inf, **options: Any) -> ScoringRun:
        bridge.wait(self._turn(deadline))
        try:
            return super().start(*args, deadline=deadline, **options)
        finally:
            self._beginning.release()

    async def _turn(self, deadline: float) -> None:
        """Wait until this client is starting fewer than `_BEGINNING` other runs. Raises `RunTimeout` at
        `deadline`.
        """
        seconds = None if math.isinf(deadline) else deadline - system.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self._beginning.acquire()
        except TimeoutError:
            raise RunTimeout(
                "0 rows were done when the time was over: others began before this run"
            ) from None


class AsyncScoringRun(Generic[RowScore]):
    """Handle of a submitted run for asyncio, like `ScoringRun`. If a task is cancelled while it reads the
    run, the run is cancelled too, unless the run is detached.
    """

    def __init__(self, run: ScoringRun[RowScore]) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The run's id, as in logs and Redis keys. Other processes attach to a detached run by this id.

        If the model is an alias for several versions, there is an id for each version that scores rows. The
        ids are separated by commas.
        """
        return self._run.id

    @property
    def model(self) -> str:
        """Name of the model that scores the run.

        If the run was given an alias, this is the version for which the alias stood when the run began. If
        several versions score rows, their names are separated by commas.
        """
        return self._run.model

    @property
    def versions(self) -> list[tuple[str, str | None, npt.NDArray[np.int64] | slice]]:
        """Name, revision and row numbers of each model that scores the run. There are several models if the
        run's model is an alias for several versions.
        """
        return self._run.versions

    @property
    def stats(self) -> RunStats:
        """Statistics of the rows that were read so far, such as their tokens and workers."""
        return self._run.stats

    @property
    def errors(self) -> Mapping[int, str]:
        """The reason why a row has no score, by row number (from 0), for the rows read so far."""
        return self._run.errors

    @property
    def labels(self) -> tuple[str, ...]:
        """With ``all_labels``, the labels of a row's scores, in the order of the scores. Empty until a scored
        chunk was read.
        """
        return self._run.labels

    @property
    def found(self) -> Sequence[str | None]:
        """The tokens of each row read so far, as the JSON of a `TokensFound`. The list is empty unless the
        run asks workers for tokens instead of scores.
        """
        return self._run.found

    async def progress(self) -> Progress:
        """The number of the run's rows that are done, and the speed; a row is done when its chunk is
        finished.
        """
        return await bridge.run(lambda: self._run.progress)

    async def wait(self, timeout: float | None = None, *, show_progress: bool | None = None) -> RunStats:
        """Wait for the end of the run, as `ScoringRun.wait` does."""
        return await self._read(self._run.wait, timeout, show_progress=show_progress)

    async def scores(self, timeout: float | None = None, *, show_progress: bool | None = None) -> Scores:
        """Wait for all scores, as `ScoringRun.scores` does."""
        return await self._read(self._run.scores, timeout, show_progress=show_progress)

    async def __aiter__(self) -> AsyncIterator[RowScore]:
        """Yield the scores in input order, as `ScoringRun` does."""
        scores = iter(self._run)
        while (score := await self._read(next, scores, None)) is not None:
            yield score

    async def cancel(self) -> None:
        """Cancel the run: its waiting chunks leave the queue, and its keys are deleted."""
        await bridge.run(self._run.cancel)

    async def _read(self, do: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        try:
            return await bridge.run(do, *args, **options)
        except asyncio.CancelledError:
            if not self._run.is_detached:
                await self.cancel()
            raise


def _attached(handle: ScoringRun | FileHandle) -> AsyncScoringRun | AsyncFileHandle:
    return AsyncScoringRun(handle) if isinstance(handle, ScoringRun) else handle.awaited()


def _as_it_is(value: T) -> T:
    return value


def _awaited(
    do: Callable[Concatenate[Client, P], T], to: Callable[[T], R]
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    """Make a coroutine method of `AsyncClient` from the method `do` of `Client`. The function `to` converts
    the result.
    """

    async def call(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> R:
        await self._open()
        return to(await bridge.run(do, self._client, *args, **options))

    update_wrapper(call, do)
    return call


class AsyncClient:
    """A client for asyncio with the methods of `Client`. Any number of runs can share its few connections.

    If a task is cancelled while it waits for a run, the run is cancelled too, unless the run is detached. A
    client belongs to the event loop that uses it first. Use the client as a context manager, or `close` it.

    The parameters are those of `Client`; the client connects when it is first entered or called.

    Raises
    ------
    ConfigError
        As in `Client`; also raised by calls from another event loop.
    ConnectionFailed
        Raised by calls, not by the constructor: no server answers at the URL.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        no_workers_seconds: float | None = 60.0,
        settings: Settings | None = None,
        **options: Unpack[SettingsOptions],
    ) -> None:
        self._client = self._loop_client(
            redis_url, no_workers_seconds=no_workers_seconds, settings=settings, **options
        )
        self._opening: asyncio.Task[None] | None = None

    def _loop_client(self, redis_url: str | None, **options: Any) -> LoopClient:
        return LoopClient(redis_url, **options)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    score = _awaited(Client.score, _as_it_is)
    score_models = _awaited(Client.score_models, _as_it_is)
    rank = _awaited(Client.rank, _as_it_is)
    classify = _awaited(Client.classify, _as_it_is)
    if TYPE_CHECKING:

        @overload
        async def submit(
            self,
            pairs: Pairs | None = None,
            *,
            all_labels: Literal[False] = False,
            **options: Unpack[SubmitOptions],
        ) -> AsyncScoringRun[float]: ...

        @overload
        async def submit(
            self, pairs: Pairs | None = None, *, all_labels: Literal[True], **options: Unpack[SubmitOptions]
        ) -> AsyncScoringRun[list[float]]: ...

        @overload
        async def submit(
            self, pairs: Pairs | None = None, *, all_labels: bool, **options: Unpack[SubmitOptions]
        ) -> AsyncScoringRun[Any]: ...

        async def submit(self, *pairs: Any, **options: Any) -> AsyncScoringRun[Any]: ...

    else:
        submit = _awaited(Client.submit, AsyncScoringRun)

    begin = _awaited(Client.begin, AsyncScoringRun)
    attach = _awaited(Client.attach, _attached)

    async def submit_file(self, inputs: str | Sequence[str], output: str, **options: Any) -> AsyncFileHandle:
        """Hand files to runners, as `Client.submit_file` does, with the same parameters."""
        await self._open()
        return (await bridge.run(self._client.submit_file, inputs, output, **options)).awaited()

    async def close(self) -> None:
        """Close the connections; unfinished runs stay on the server until they expire."""
        await self._client.store.end()

    async def _open(self) -> None:
        """Check that the Redis server answers, unless an earlier check has succeeded."""
        loop = asyncio.get_running_loop()
        if self._opening is None or (self._opening.done() and _failed(self._opening)):
            self._opening = loop.create_task(self._probe())
        if self._opening.get_loop() is not loop:
            raise ConfigError("an AsyncClient belongs to one event loop: make one in each")
        await asyncio.shield(self._opening)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._client.store.probe()
        except (redis.RedisError, OSError) as error:  # TimeoutError is a subclass of OSError
            if failed := connection_failed(self._client.url, error):
                raise failed from None
        else:
            await bridge.run(self._client.note_durability)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
