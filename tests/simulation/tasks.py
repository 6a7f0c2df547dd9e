"""Event loops in virtual time, for the asyncio client: a loop is a thread of the world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import greenlet
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

import rankmill.producer.client.aio.connection as aio_connection
from tests.simulation.world import Event, Thread, World, world


class Selector:
    """What a loop waits with: there are no sockets, only other threads that wake it up."""

    def __init__(self) -> None:
        self.woken = Event()

    def select(self, timeout: float | None) -> list[Any]:
        if timeout != 0:  # else it has more to do at once, and others come when it waits
            self.woken.wait(timeout)
        self.woken.clear()
        return []

    def close(self) -> None:
        pass


class Loop(asyncio.BaseEventLoop):
    """An event loop whose clock, waits and threads are the world's."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = Selector()

    def time(self) -> float:
        return world().monotonic()

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._selector.woken.set()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call `func` in a thread of its own."""
        future = self.create_future()

        def settle(error: BaseException | None, found: Any = None) -> None:
            if future.done():
                return
            if error:
                future.set_exception(error)
            else:
                future.set_result(found)

        def run() -> None:
            try:
                found = func(*args)
            except greenlet.GreenletExit:
                raise
            except BaseException as error:
                self.call_soon_threadsafe(settle, error)
            else:
                self.call_soon_threadsafe(settle, None, found)

        Thread(target=run, name="executor").start()
        return future


class LoopConnection(redis.asyncio.Connection):
    """An asyncio process's side of a connection: what it has sent is carried out while the loop goes on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        pool: Any = world().redis.client(0).connection_pool
        self._plain = pool.make_connection()
        self._plain.retry = Retry(NoBackoff(), 0)  # `LoopPatience` tries again
        self._sending: asyncio.Future[Any] | None = None

    @property
    def is_connected(self) -> bool:
        return self._plain._sock is not None

    async def connect(self) -> None:
        if not self.is_connected:
            await _in_thread(self._plain.connect)

    async def connect_check_health(self, *_: Any, **options: Any) -> None:
        await self.connect()

    async def disconnect(self, *_: Any, **options: Any) -> None:
        self._plain.disconnect()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        await self.connect()
        self._sending = asyncio.ensure_future(_in_thread(self._plain.send_packed_command, command))

    def pack_command(self, *words: Any) -> Any:
        return self._plain.pack_commands([words])

    def pack_commands(self, commands: Any) -> Any:
        return self._plain.pack_commands(commands)

    async def read_response(self, *_: Any, **options: Any) -> Any:
        if self._sending:
            await asyncio.shield(self._sending)
            self._sending = None
        return self._plain.read_response()

    async def can_read(self) -> bool:
        return self._plain.can_read()  # type: ignore[no-any-return]

    can_read_destructive = can_read

    def _close(self) -> None:
        self._plain.disconnect()


async def _in_thread(do: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, do, *args)


def prepare(mine: World) -> None:
    """Let asyncio clients connect to the world's server."""
    kinds = dict.fromkeys(aio_connection._KINDS, LoopConnection)
    mine.patch(aio_connection, "_KINDS", kinds)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`, for the code of a process."""
    loop = Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        if not loop.is_running():
            loop.close()
