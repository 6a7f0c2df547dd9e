"""One connection for the commands of all tasks: those that come while others are under way go together."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import redis
import redis.asyncio

_AT_ONCE = 64
"""Most callers whose commands are sent together; further ones wait for the next turn."""

Command: TypeAlias = tuple[Any, ...]


class _Call(NamedTuple):
    commands: Sequence[Command]
    replies: asyncio.Future[list[Any]]


class Line:
    """Sends the commands of many tasks over one connection at a time.

    A system call costs more than a small command. So the commands of tasks that run at the same time share
    one write and few reads, and a lone task's commands do not wait. A call whose task is cancelled is not
    sent, or its replies are dropped; the others do not notice.

    Parameters
    ----------
    pool
        Has the connection.
    silence
        A connection that is silent for so many seconds is given up.
    """

    def __init__(self, pool: redis.asyncio.ConnectionPool, silence: float | None) -> None:
        self._pool: Any = pool
        self._silence = silence
        self._calls: list[_Call] = []
        self._task: asyncio.Task[None] | None = None

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands one after the other, with none between them; return the replies.

        Errors that the server replies are among the replies; if the connection breaks, that is raised.
        """
        call = _Call(commands, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())
        return await call.replies

    async def close(self) -> None:
        """Stop sending."""
        if self._task and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send_all(self) -> None:
        while self._calls:
            calls = [call for call in self._calls[:_AT_ONCE] if not call.replies.done()]
            del self._calls[:_AT_ONCE]
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
            await connection.disconnect(nowait=True)  # replies that are still to come are nobody else's
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
