"""Waits for the results of many runs with one command over one connection."""

from __future__ import annotations

import asyncio
import copy
import math
from itertools import count
from typing import Any, TypeAlias

import redis.asyncio

from rankmill.jobs.contract import keys
from rankmill.jobs.system import system

_BLOCK_SECONDS = 1.0
"""One XREAD command waits at most this many seconds for the next result."""

_BELL_SECONDS = 60

_PAUSE_SECONDS = 1e-4
"""Pause after an XREAD command, in seconds for each stream read. Results that come in the pause are read
together by the next command.
"""

Entries: TypeAlias = list[tuple[bytes, dict[bytes, bytes]]]
Found: TypeAlias = list[tuple[bytes, Entries]]


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
                # Do not let the server choose the id of the entry: it takes the id from its clock, which may
                # be behind the last id after a loss of data. The ids from this process always increase.
                pipe.xadd(self._bell, {"run": 1}, id=str(next(self._rings)), maxlen=1)
                pipe.expire(self._bell, _BELL_SECONDS)
                await pipe.execute()
        except redis.RedisError:
            pass  # no message here: the command that waits for results fails as well


def _found(reply: Any) -> Found:
    """Return a reply to XREAD as a list; redis-py gives it as a list or as a dictionary."""
    return list(reply.items() if isinstance(reply, dict) else reply or ())
