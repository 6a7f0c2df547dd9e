"""Runs synchronous code in an event loop. Where the code waits, the task that called `run` awaits instead.

The code runs in a greenlet, which is a second call stack in the same thread. To wait, the code switches to
the task's own stack. The task awaits, and then switches back. So `Client` and `AsyncClient` share one
protocol, which is written without ``await``. SQLAlchemy's asyncio engine works in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

from greenlet import getcurrent, greenlet

P = ParamSpec("P")
T = TypeVar("T")


class _Bridge(greenlet):
    """A greenlet for the current task, with the task's context variables."""

    def __init__(self, do: Callable[..., Any]) -> None:
        task = getcurrent()
        super().__init__(do, task)
        self.gr_context = task.gr_context
        self.task = task


async def run(do: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call the synchronous function `do`, and return its result. When `do` calls `wait`, the current task
    awaits. If the task is cancelled meanwhile, `wait` raises `asyncio.CancelledError`.
    """
    stack = _Bridge(do)
    outcome = stack.switch(*args, **options)
    while not stack.dead:
        try:
            reply = await cast("Awaitable[Any]", outcome)
        except BaseException:
            outcome = stack.throw(*sys.exc_info())
        else:
            outcome = stack.switch(reply)
    return cast("T", outcome)


def wait(awaitable: Awaitable[T]) -> T:
    """Let the current task await `awaitable`, and return the result. Only code that `run` has called can use
    this.
    """
    stack = getcurrent()
    assert isinstance(stack, _Bridge), "waits of this kind need the event loop"
    return cast("T", stack.task.switch(awaitable))
