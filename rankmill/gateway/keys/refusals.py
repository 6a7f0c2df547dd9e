"""Why a request is refused before any work: each class says the status of the answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from rankmill.jobs.contract.errors import RankmillError


class Refused(RankmillError):
    """The request is refused; `status` is that of HTTP."""

    status: ClassVar[HTTPStatus]


class NoKey(Refused):
    """The request names no API key, or one that is unknown, revoked or expired."""

    status = HTTPStatus.UNAUTHORIZED


class NotAllowed(Refused):
    """The key may not do that."""

    status = HTTPStatus.FORBIDDEN


class TooManyPairs(Refused):
    """The request alone has more pairs than its key may ever score in a minute."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class OverLimit(Refused):
    """The key's limit is reached; the same request works `retry_after` seconds later."""

    status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after
