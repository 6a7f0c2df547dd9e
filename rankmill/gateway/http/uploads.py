"""Reads a form with a file, within limits: the file lies on disk, and not in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from rankmill.gateway.bodies import Pace, stated_bytes
from rankmill.gateway.refusals import Refusal

_FORM_BYTES = 1 << 20
"""Bytes that the form may have beside its file."""


@asynccontextmanager
async def uploaded(request: Request, most: int) -> AsyncIterator[UploadFile]:
    """The file of a form.

    Raises
    ------
    Refusal
        The file has more than `most` bytes, or does not come, or the body is no such form.
    """
    seen, pace = 0, Pace()

    async def receive() -> Message:
        nonlocal seen
        async with pace.waiting():
            message = await request.receive()
        size = len(message.get("body", b""))
        pace.came(size)
        seen += size
        if seen > most + _FORM_BYTES:
            raise _too_large(most)
        return message

    if stated_bytes(request) > most + _FORM_BYTES:
        raise _too_large(most)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refusal("media_type", "send a form, with Content-Type: multipart/form-data")
    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=10) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not file.filename:
                raise Refusal("invalid", "file: a file with a name is missing", param="file")
            if purpose != "batch":
                raise Refusal("invalid", "purpose: must be batch", param="purpose")
            if (file.size or 0) > most:
                raise _too_large(most)
            yield file
    except HTTPException as error:  # the form is malformed
        raise Refusal("invalid", f"the form cannot be read: {error.detail}") from None
    except ClientDisconnect:
        raise Refusal("invalid", "the connection was closed before the whole file was there") from None


def _too_large(most: int) -> Refusal:
    return Refusal("too_large", f"the file is larger than {most >> 20} MiB, the most that is kept")
