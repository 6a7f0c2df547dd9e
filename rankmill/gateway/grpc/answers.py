"""How calls are answered: who calls, what is seen of it, and what a refusal is in gRPC's terms."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from grpc import StatusCode
from grpc.aio import ServicerContext

from rankmill.gateway.observation import HEADER, Observation, observing
from rankmill.gateway.refusals import EXPECTED, KINDS, Refusal, refusal_of

if TYPE_CHECKING:
    from rankmill.gateway.gateway import Gateway
    from rankmill.gateway.keys.api_keys import ApiKey

T = TypeVar("T")

Context = ServicerContext[Any, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A call that was let in: what is seen of it, and its key."""

    note: Observation
    key: ApiKey | None


async def answer(
    gateway: Gateway, context: Context, route: str, do: Callable[[Call], Awaitable[T]], *, scores: bool
) -> T:
    """Let a call in as the gateway lets in requests by HTTP, and answer it.

    Parameters
    ----------
    gateway, context
        What all its ways in share; the call as gRPC has it.
    route
        The method, as metrics have it.
    do
        Makes the answer; what it raises of `EXPECTED` ends the call with a status.
    scores
        Whether it asks for scores: then there must be room for it.
    """
    given = headers(context)
    with observing(given.get(HEADER, ""), StatusCode.CANCELLED.name) as note:
        note.route, note.dialect = route, "tei"
        context.set_trailing_metadata(((HEADER, note.id),))
        try:
            if scores:
                async with gateway.admitted(note, given) as key:
                    found = await do(Call(note, key))
            else:
                found = await do(Call(note, await gateway.identify(note, given)))
        except EXPECTED as error:
            await _abort(context, note, refusal_of(error))
        except Exception:
            logger.exception("the call of %s failed", route)
            text = f"the call failed; the gateway's log has the reason, with request={note.id}"
            await _abort(context, note, Refusal("backend", text))
        note.status = StatusCode.OK.name
        return found


async def _abort(context: Context, note: Observation, refusal: Refusal) -> NoReturn:
    """End the call; what knows of gRPC's retries waits as long as the refusal says."""
    trailing = [(HEADER, note.id)]
    if refusal.retry_after is not None:
        seconds = max(math.ceil(refusal.retry_after), 1)
        trailing += [("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(1000 * seconds))]
    note.status = KINDS[refusal.kind].grpc
    await context.abort(StatusCode[note.status], refusal.message, tuple(trailing))


def headers(context: Context) -> dict[str, str]:
    """The call's metadata that is text."""
    found = context.invocation_metadata() or ()
    return {str(name): value for name, value in found if isinstance(value, str)}
