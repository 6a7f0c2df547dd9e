"""Scoring from asyncio: the calls of `Client`, awaited.

>>> async with AsyncClient("redis://localhost:6379/0") as client:                        # doctest: +SKIP
...     best = await client.rank("how far is the moon", ["Cheese.", "About 384,000 km."])
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import redis

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.registry.resolver import Resolver
from rankmill.jobs.runtime.connection import connection_failed
from rankmill.producer.client.aio import bridge
from rankmill.producer.client.aio.connection import LoopRedis
from rankmill.producer.client.aio.runs import AsyncDetachedRun, AsyncScoringRun, AsyncSubmittedFile
from rankmill.producer.client.client import Client
from rankmill.producer.client.runs.detached import DetachedRun
from rankmill.producer.collect.pairs import COLUMNS

if TYPE_CHECKING:
    from rankmill.jobs.contract.priority import Priority
    from rankmill.jobs.contract.spec import SpecOptions
    from rankmill.jobs.registry.registry import Resolved
    from rankmill.jobs.runtime.settings import Settings
    from rankmill.producer.client.runs.scores import Ranked, Scores
    from rankmill.producer.client.runs.scoring_run import ScoringRun
    from rankmill.producer.collect.pairs import Pairs

__all__ = ["AsyncClient", "AsyncScoringRun"]

T = TypeVar("T")

_PROBE_SECONDS = 5
_PATROL_SECONDS = 0.2
_PATROL_SECONDS_PER_RUN = 0.01
"""How often each run looks at the server while it waits; many runs look less often, each."""

_BEGINNING = 32
"""Most runs that are being begun at a time: of a thousand that come together, the first do not wait for the
last to be encoded."""

_SMALL_ROWS = 256
"""Rows that are encoded where they are; more are encoded in a thread."""


class LoopStore(RunStore):
    """Runs on one server, for code that `bridge.run` calls."""

    def __init__(self, client: LoopRedis) -> None:
        super().__init__(client)
        self._streams = client.streams
        self._background: set[asyncio.Task[None]] = set()

    @property
    def patrol_seconds(self) -> float:
        return max(_PATROL_SECONDS, _PATROL_SECONDS_PER_RUN * len(self._streams))

    def compute(self, do: Callable[[], T], rows: int) -> T:
        return do() if rows <= _SMALL_ROWS else bridge.wait(asyncio.to_thread(do))

    def later(self, do: Callable[[], None]) -> None:
        task = asyncio.create_task(bridge.run(do))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _LoopResolver(Resolver):
    """Asks the registry in a thread, so that the loop goes on."""

    def choice(self, model: str) -> Resolved | None:
        if self.knows(model):
            return super().choice(model)
        return bridge.wait(asyncio.to_thread(super().choice, model))


class _LoopClient(Client):
    """A client whose methods `bridge.run` calls."""

    _resolver_class = _LoopResolver

    def _connect(self, url: str) -> RunStore:
        self.url = url
        self._beginning = asyncio.Semaphore(_BEGINNING)
        self.redis = LoopRedis(url, self.settings.redis_wait_seconds)
        return LoopStore(self.redis)

    def start(self, *args: Any, **options: Any) -> ScoringRun:
        bridge.wait(self._beginning.acquire())
        try:
            return super().start(*args, **options)
        finally:
            self._beginning.release()


class AsyncClient:
    """The calls of `Client` for asyncio; any number of runs at the same time share a few connections.

    A call whose task is cancelled cancels its run. A client belongs to the event loop that uses it first. Use
    it as a context manager, or `close` it.

    Parameters are those of `Client`; nothing is connected before the first call.

    Raises
    ------
    ConfigError
        As `Client`; also, from any call, in another event loop.
    ConnectionFailed
        From the first call: no server answers at the URL.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        no_workers_seconds: float | None = 60.0,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        self._client = _LoopClient(
            redis_url, no_workers_seconds=no_workers_seconds, settings=settings, **options
        )
        self._opening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncClient:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @overload
    async def submit(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        detached: Literal[True],
        **spec: Unpack[SpecOptions],
    ) -> AsyncDetachedRun: ...

    @overload
    async def submit(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> AsyncScoringRun: ...

    async def submit(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        detached: bool = False,
        **spec: Unpack[SpecOptions],
    ) -> AsyncScoringRun | AsyncDetachedRun:
        """Start a run as `Client.submit` does, with its parameters."""
        await self._open()
        how: dict[str, Any] = {"columns": columns, "priority": priority, **spec}
        if detached:
            return AsyncDetachedRun(
                await bridge.run(lambda: self._client.submit(pairs, detached=True, **how))
            )
        return AsyncScoringRun(await bridge.run(lambda: self._client.submit(pairs, **how)))

    async def submit_file(
        self, inputs: str | Sequence[str], output: str, **options: Any
    ) -> AsyncSubmittedFile:
        """Hand files to runners as `Client.submit_file` does, with its parameters."""
        await self._open()
        return AsyncSubmittedFile(await bridge.run(self._client.submit_file, inputs, output, **options))

    async def attach(self, run_id: str) -> AsyncSubmittedFile | AsyncDetachedRun:
        """A run that any process has submitted, as `Client.attach` finds it."""
        await self._open()
        found = await bridge.run(self._client.attach, run_id)
        return AsyncDetachedRun(found) if isinstance(found, DetachedRun) else AsyncSubmittedFile(found)

    async def begin(
        self,
        pairs: Pairs,
        *,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> AsyncScoringRun:
        """Start a run, or those of an alias for several versions, as `Client.begin` does."""
        await self._open()
        begin = partial(self._client.begin, pairs, columns=columns, priority=priority, **spec)
        return AsyncScoringRun(await bridge.run(begin))

    async def score(
        self,
        pairs: Pairs,
        *,
        timeout: float | None = None,
        columns: tuple[str, str] = COLUMNS,
        priority: Priority | None = None,
        **spec: Unpack[SpecOptions],
    ) -> Scores:
        """Score pairs as `Client.score` does, with its parameters."""
        await self._open()
        begin = partial(
            self._client.score, pairs, timeout=timeout, columns=columns, priority=priority, **spec
        )
        return await bridge.run(begin)

    async def rank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        top_k: int | None = None,
        timeout: float | None = None,
        **spec: Unpack[SpecOptions],
    ) -> list[Ranked]:
        """Rank passages as `Client.rank` does, with its parameters."""
        await self._open()
        begin = partial(self._client.rank, query, passages, top_k=top_k, timeout=timeout, **spec)
        return await bridge.run(begin)

    async def close(self) -> None:
        """Close the connections; runs that are not finished stay on the server until they expire."""
        await self._client.redis.streams.close()
        await self._client.redis.line.close()
        await self._client.redis.loop_client.aclose()

    async def _open(self) -> None:
        """See once whether a server answers."""
        loop = asyncio.get_running_loop()
        if self._opening is None or (self._opening.done() and _failed(self._opening)):
            self._opening = loop.create_task(self._probe())
        if self._opening.get_loop() is not loop:
            raise ConfigError("an AsyncClient belongs to one event loop: make one in each")
        await asyncio.shield(self._opening)

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                probe: Any = self._client.redis.loop_client
                await probe.execute_command("PING")
        except (redis.RedisError, OSError) as error:  # a TimeoutError is an OSError
            if failed := connection_failed(self._client.url, error):
                raise failed from None


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
