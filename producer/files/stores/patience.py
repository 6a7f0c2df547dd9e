"""Waiting for an object store that does not serve just now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from rankmill.jobs.contract.errors import InputError, RankmillError, StoreError

LOOK_SECONDS = 15.0
"""How long a store may be away when something is looked up: at the beginning, before any work."""

WORK_SECONDS = 600.0
"""How long a store may be away while an object is read or written."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0

_LASTING = (ImportError, NotImplementedError, TypeError, ValueError)
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}
"""Names of errors of libraries that need not be installed."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def patiently(what: object, action: Callable[[], T], seconds: float) -> T:
    """Return what `action` returns; where the store fails, do it again with growing pauses.

    Raises
    ------
    InputError
        There is no such object, or its URL or the store's library is wrong.
    StoreError
        The store refuses, or fails for longer than `seconds`; `what` names the object in the message.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            return action()
        except RankmillError:
            raise
        except FileNotFoundError:
            raise InputError(f"{what}: no such object") from None
        except PermissionError as error:
            raise StoreError(f"{what}: no permission ({_reason(error)})") from None
        except Exception as error:
            if isinstance(error, ImportError):
                raise InputError(f"{what}: {_reason(error)} (pip install 'rankmill[s3]' for s3://)") from None
            if isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES:
                raise InputError(f"{what}: {_reason(error)}") from None
            if time.monotonic() > deadline:
                raise StoreError(f"{what}: the store does not serve: {_reason(error)}") from None
            logger.warning("%s: the store does not serve, trying again: %s", what, _reason(error))
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
