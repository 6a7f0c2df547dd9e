"""A Redis client for synchronous code, which `producer.client.aio.bridge` runs in an event loop.

It uses the asyncio connections of redis-py. The commands of all tasks share one connection. Commands that
come while others are in progress wait for these, and are then sent together. On another connection, a single
command waits for the results of all runs.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

import redis
import redis.asyncio
from greenlet import getcurrent
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.client import Pipeline

from rankmill.jobs.contract import keys
from rankmill.jobs.runtime.connection import IN_TIME, WaitingPool, pool_for
from rankmill.jobs.runtime.patience import Patience, end_of_command
from rankmill.jobs.runtime.sentinel import MasterConnection, MasterFinder, TlsMasterConnection
from rankmill.jobs.system import system
from rankmill.producer.client.aio.bridge import wait

T = TypeVar("T")

_CONNECTIONS = 16
"""A client has at most this many connections to Redis. If none is free, a task waits for one."""

_MOST_CALLS = 64
"""The commands of at most this many calls of `Line.send` are sent in one write. Further calls wait for the
next write.
"""

_BLOCK_SECONDS = 1.0
"""One XREAD command waits at most this many seconds for the next result."""

_BELL_SECONDS = 60

_PAUSE_SECONDS = 1e-4
"""After an XREAD command, the reader pauses for this many seconds times the number of streams. The next
command then reads all results that came during the pause.
"""

Command: TypeAlias = tuple[Any, ...]
Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]
Found: TypeAlias = list[tuple[bytes, Entries]]


class _Call(NamedTuple):
    commands: Sequence[Sequence[Any]]
    replies: asyncio.Future[list[Any]]


class Line:
    """Sends the Redis commands of many tasks over one connection.

    A system call costs more than a small command. So the commands of tasks that run at the same time share
    one write and few reads. This does not delay the commands of a single task. If a task is cancelled before
    its call is sent, the call is not sent. If a task is cancelled later, the replies to its call are dropped.
    Other tasks do not notice a cancellation.

    Parameters
    ----------
    pool
        The pool that the connection comes from.
    silence
        The connection is closed if the last reply does not come within this many seconds after the commands
        were sent.
    """

    def __init__(self, pool: redis.asyncio.ConnectionPool, silence: float | None) -> None:
        self._pool: Any = pool
        self._encode: Callable[[Any], Any] = pool.get_encoder().encode  # type: ignore[no-untyped-call]
        self._silence = silence
        self._calls: list[_Call] = []
        self._task: asyncio.Task[None] | None = None

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands one after the other, with no commands of other tasks between them; returns the
        replies.

        An error that the server replies is returned as a reply. An error of the connection is raised.
        """
        # Encode before calls are joined: an argument that cannot be encoded must fail only its own call.
        encoded = [[*map(self._encode, command)] for command in commands]
        call = _Call(encoded, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())
        return await call.replies

    async def close(self) -> None:
        if self._task and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send_all(self) -> None:
        while self._calls:
            calls = [call for call in self._calls[:_MOST_CALLS] if not call.replies.done()]
            del self._calls[:_MOST_CALLS]
            try:
                await self._exchange(calls)
            except asyncio.CancelledError:
                for call in (*calls, *self._calls):
                    call.replies.cancel()
                raise
            except Exception as error:
                for call in calls:
                    if not call.replies.done():
                        call.replies.set_exception(copy.copy(error))

    async def _exchange(self, calls: Sequence[_Call]) -> None:
        connection = await self._pool.get_connection()
        try:
            async with asyncio.timeout(self._silence):
                commands = [command for call in calls for command in call.commands]
                await connection.send_packed_command(connection.pack_commands(commands))
                for call in calls:
                    replies = [await _reply(connection) for _ in call.commands]
                    if not call.replies.done():
                        call.replies.set_result(replies)
        except BaseException as error:
            # Close the connection: otherwise another command would get the replies that are still to come.
            await connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise redis.TimeoutError("it does not answer") from error
            raise
        finally:
            await self._pool.release(connection)


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except redis.ResponseError as error:
        return error


class Streams:
    """Reads the result streams of many runs with one command.

    Each task gets the entries of the run that it waits for. A second task that waits for the same run sends
    its own command.

    A task may begin to wait while the command for other runs is still waiting. To end that command early, the
    reader adds an entry to a stream of its own (the bell), which every command also reads. The next command
    then reads the new run's stream too.

    Parameters
    ----------
    client
        A client of the server that has the streams.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client: Any = client
        self._bell = keys.reader_bell(system.unique_id())
        self._rung, self._rings = "0", count(1)
        self._waiting: dict[str, tuple[str, asyncio.Future[Found]]] = {}
        self._asked: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._ringing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def read(self, stream: str, after: str, seconds: float) -> Found:
        """Return the entries of `stream` that follow the entry with the id `after`. Wait up to `seconds` for
        the first one, and return an empty list if none comes.
        """
        # If another task already waits for this stream, send a command only for this task: the two tasks may
        # have read the stream up to different entries.
        if stream in self._waiting:
            return _found(await self._client.xread({stream: after}, block=math.ceil(1000 * seconds)))
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = after, future
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_all())
        elif self._asked and stream not in self._asked and (self._ringing is None or self._ringing.done()):
            self._ringing = asyncio.create_task(self._ring())
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return []
        finally:
            del self._waiting[stream]

    async def close(self) -> None:
        for task in (self._task, self._ringing):
            if task and not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                streams = {stream: after for stream, (after, _) in self._waiting.items()}
                self._asked = set(streams)
                block = math.ceil(1000 * _BLOCK_SECONDS)
                reply = await self._client.xread({**streams, self._bell: self._rung}, block=block)
                self._asked = set()
                for name, entries in _found(reply):
                    self._take(name.decode(), entries)
                await asyncio.sleep(_PAUSE_SECONDS * len(streams))
        except Exception as error:
            for _, future in self._waiting.values():
                if not future.done():
                    future.set_exception(copy.copy(error))
        finally:
            self._asked = set()

    def _take(self, stream: str, entries: Entries) -> None:
        if stream == self._bell:
            self._rung = entries[-1][0].decode()
        elif stream in self._waiting and not self._waiting[stream][1].done():
            # If no task waits for the run any more, its entries stay on the server.
            self._waiting[stream][1].set_result([(stream.encode(), entries)])

    async def _ring(self) -> None:
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                # Do not let the server choose the id of the entry. A server takes ids from its clock, and
                # after a loss of data the clock may be behind the last id. The ids from this process always
                # increase.
                pipe.xadd(self._bell, {"run": 1}, id=str(next(self._rings)), maxlen=1)
                pipe.expire(self._bell, _BELL_SECONDS)
                await pipe.execute()
        except redis.RedisError:
            pass  # no message is needed: the XREAD command fails as well, and reports it


def _found(reply: Any) -> Found:
    """Return a reply to XREAD as a list; redis-py gives it as a list or as a dictionary."""
    return list(reply.items() if isinstance(reply, dict) else reply or ())


class LoopPatience(Patience):
    """Repeats Redis commands while the server cannot serve, like `Patience`. It waits in the event loop, so
    that other tasks continue.
    """

    def sleep(self, seconds: float) -> None:
        wait(asyncio.sleep(seconds))

    def caller(self) -> int:
        return id(getcurrent())


class LoopRedis(redis.Redis):
    """A Redis client with the methods of redis-py's synchronous client, for code that `bridge.run` calls.

    It sends the commands over asyncio connections.

    Parameters
    ----------
    url
        URL of the server, such as ``redis://localhost:6379/0``.
    wait_seconds
        Longest wait of each command, in seconds, while the server cannot serve.
    """

    def __init__(self, url: str, wait_seconds: float) -> None:
        self._patience = LoopPatience(wait_seconds)
        pool = pool_for(url, self._patience)  # reads and checks the options, but does not connect
        super().__init__(connection_pool=pool)
        connections = loop_pool(pool)
        self.loop_client = redis.asyncio.Redis.from_pool(connections)
        self.line = Line(connections, pool.connection_kwargs["socket_timeout"])
        self.streams = Streams(self.loop_client)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        (reply,) = self.patiently(lambda: self._send(args))
        return self.read_reply(reply, args, options)

    async def _send(self, command: Command) -> list[Any]:
        (reply,) = replies = await self.line.send([command])
        if isinstance(reply, Exception):
            raise reply
        return replies

    def read_reply(self, reply: Any, command: Command, options: dict[str, Any]) -> Any:
        """Convert a server's reply to `command` into what redis-py's synchronous client returns."""
        options.pop("keys", None)  # redis-py adds ``keys`` for its own cache
        callbacks: Any = self.response_callbacks
        return callbacks[command[0]](reply, **options) if command[0] in callbacks else reply

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        return LoopPipeline(self, transaction)

    def xread(self, streams: Any, count: int | None = None, block: int | None = None, *more: Any) -> Any:
        """Send XREAD as redis-py does. With `block`, only one stream can be read, and calls of several tasks
        share one command (`Streams`).
        """
        if not block:
            return super().xread(streams, count, block, *more)
        ((stream, after),) = streams.items()
        return self.patiently(lambda: self.streams.read(stream, after, block / 1000))

    def patiently(self, do: Callable[[], Awaitable[T]]) -> T:
        """Call `do`, which sends a command, and repeat the call while the Redis server cannot serve.

        An attempt that has not ended by `end_of_command()` is cancelled.
        """
        end = end_of_command()
        reason: redis.RedisError = redis.TimeoutError("it does not answer in time")

        async def in_time() -> T:
            nonlocal reason
            seconds = end - system.monotonic()
            try:
                async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                    return await do()
            except redis.RedisError as error:
                reason = error
                raise
            except TimeoutError as error:  # an earlier attempt's error says more than "no answer"
                raise reason from error

        return self._patience.call_with_retry(lambda: wait(in_time()), self._reconnect)

    def _reconnect(self, error: redis.RedisError) -> None:
        """Close idle connections if a server replies with an error, because after a failover these
        connections may belong to a server that is no longer the master. Connections that break are closed by
        redis-py itself.
        """
        if isinstance(error, redis.ResponseError):
            wait(self.loop_client.connection_pool.disconnect(inuse_connections=False))


class LoopPipeline(Pipeline):
    """A pipeline whose commands are sent together; it does not support WATCH."""

    def __init__(self, client: LoopRedis, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client, self._transaction = client, transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = list(self.command_stack)
        try:
            if not commands:
                return []
            return self._client.patiently(lambda: self._send(commands, raise_on_error))
        finally:
            self.reset()

    async def _send(self, commands: list[Any], raise_on_error: bool) -> list[Any]:
        stack = [args for args, _ in commands]
        if self._transaction:
            *queued, replies = await self._client.line.send([("MULTI",), *stack, ("EXEC",)])
            if isinstance(replies, Exception):
                raise next((reply for reply in queued if isinstance(reply, Exception)), replies)
        else:
            replies = await self._client.line.send(stack)
        failed = [reply for reply in replies if isinstance(reply, Exception)]
        if failed and raise_on_error:
            raise failed[0]
        return [
            reply if isinstance(reply, Exception) else self._client.read_reply(reply, args, options)
            for reply, (args, options) in zip(replies, commands, strict=True)
        ]


class _LoopMaster(redis.asyncio.Connection):
    """A connection to the Redis master that Sentinels name. Each attempt to connect asks `finder` for the
    present master.
    """

    def __init__(self, *, finder: MasterFinder, **options: Any) -> None:
        super().__init__(**options)
        self._finder = finder

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._finder.find)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Send a command. If the master has moved, connect to the new one first (see `MasterConnection`)."""
        if self.is_connected:
            look, address = self._finder.has_moved, (self.host, self.port)
            # Use a thread only if Sentinels must be asked: a thread costs more than a command, and may not be
            # free.
            if await asyncio.to_thread(look, address) if self._finder.is_due else look(address):
                await self.disconnect(nowait=True)
        await super().send_packed_command(*args, **options)


class _LoopTlsMaster(_LoopMaster, redis.asyncio.SSLConnection):
    """A connection over TLS to the Redis master that Sentinels name."""


_KINDS: dict[Any, Any] = {
    IN_TIME[redis.Connection]: redis.asyncio.Connection,
    IN_TIME[redis.SSLConnection]: redis.asyncio.SSLConnection,
    IN_TIME[redis.UnixDomainSocketConnection]: redis.asyncio.UnixDomainSocketConnection,
    MasterConnection: _LoopMaster,
    TlsMasterConnection: _LoopTlsMaster,
}


def loop_pool(pool: WaitingPool) -> redis.asyncio.BlockingConnectionPool:
    """Make a pool of asyncio connections with the options of the synchronous `pool`. The connections retry
    nothing, because `Patience` repeats the commands.
    """
    options = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)}
    return redis.asyncio.BlockingConnectionPool(
        max_connections=_CONNECTIONS,
        timeout=None,
        connection_class=_KINDS[pool.connection_class],
        **options,
    )
