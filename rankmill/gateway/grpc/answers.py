"""How calls are answered: who calls, and what a refusal is in gRPC's terms."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from grpc import StatusCode
from grpc.aio import ServicerContext

from jobs.errors import RankmillError
from rankmill.gateway.refusals import Kind, Refusal, refusal_of

Context = ServicerContext[Any, Any]

CODES: dict[Kind, StatusCode] = {
    "invalid": StatusCode.INVALID_ARGUMENT,
    "empty": StatusCode.INVALID_ARGUMENT,
    "too_large": StatusCode.INVALID_ARGUMENT,
    "no_key": StatusCode.UNAUTHENTICATED,
    "forbidden": StatusCode.PERMISSION_DENIED,
    "no_model": StatusCode.NOT_FOUND,
    "not_found": StatusCode.NOT_FOUND,
    "media_type": StatusCode.INVALID_ARGUMENT,
    "busy": StatusCode.RESOURCE_EXHAUSTED,
    "overloaded": StatusCode.RESOURCE_EXHAUSTED,
    "unscorable": StatusCode.INVALID_ARGUMENT,
    "backend": StatusCode.INTERNAL,
    "unavailable": StatusCode.UNAVAILABLE,
    "timeout": StatusCode.DEADLINE_EXCEEDED,
}
"""Status of each kind of refusal, as TEI has it where TEI has one."""


@asynccontextmanager
async def refusing(context: Context) -> AsyncIterator[None]:
    """End the call with a status if the ``with`` block refuses it."""
    try:
        yield
    except Refusal as refusal:
        await _abort(context, refusal)
    except RankmillError as error:
        await _abort(context, refusal_of(error))


async def _abort(context: Context, refusal: Refusal) -> NoReturn:
    """End the call; what knows of gRPC's retries waits as long as the refusal says."""
    trailing: tuple[tuple[str, str], ...] = ()
    if refusal.retry_after is not None:
        seconds = max(math.ceil(refusal.retry_after), 1)
        trailing = (("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(1000 * seconds)))
    await context.abort(CODES[refusal.kind], refusal.message, trailing)


def headers(context: Context) -> dict[str, str]:
    """The call's metadata that is text."""
    found = context.invocation_metadata() or ()
    return {str(name): value for name, value in found if isinstance(value, str)}
