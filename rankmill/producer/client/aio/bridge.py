"""Runs plain code in an event loop: each wait of the code becomes an ``await`` of the task that called `run`.

The code runs in a greenlet, which is a call stack of its own in the same thread. To wait, the code switches
to the task, which awaits and then switches back. So the client's protocol is written only once, without
``await``. SQLAlchemy's asyncio engine works in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, cast

from greenlet import getcurrent, greenlet

P = ParamSpec("P")
T = TypeVar("T")


class _Bridge(greenlet):
    """A call stack that belongs to a task and has the task's context variables."""

    def __init__(self, do: Callable[..., Any]) -> None:
        task = getcurrent()
        super().__init__(do, task)
        self.gr_context = task.gr_context
        self.task = task


async def run(do: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call `do`; this task awaits what `do` gives to `wait`. If the task is cancelled, `wait` raises
    `asyncio.CancelledError`.
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
    """Wait for `awaitable`, in code that `run` has called."""
    stack = getcurrent()
    assert isinstance(stack, _Bridge), "waits of this kind need the event loop"
    return cast("T", stack.task.switch(awaitable))
