"""The settings of submitted runs, runners and webhooks."""

from __future__ import annotations

from base64 import b64decode
from typing import Annotated

from pydantic import BeforeValidator, Field

from rankmill.jobs.runtime.passwords import remember_password, without_line_end
from rankmill.jobs.runtime.settings import ExtensionSettings, Names


def read_secret(value: object) -> str | None:
    """Check a webhook's secret, and mask it in messages from now on. ``None`` means that there is no secret.

    Raises
    ------
    ValueError
        The secret is not ``whsec_`` and 24 to 64 bytes in base64.
    """
    if value is None:
        return None
    remember_password(value)
    if not 24 <= len(secret_key(str(value))) <= 64:
        raise ValueError("a webhook's secret is whsec_ and 24 to 64 bytes in base64")
    return str(value)


def secret_key(secret: str) -> bytes:
    """The bytes of a webhook's secret; empty if the secret is not ``whsec_`` and base64."""
    try:
        return b64decode(secret.removeprefix("whsec_"), validate=True) if secret.startswith("whsec_") else b""
    except ValueError:
        return b""


class RunnerSettings(ExtensionSettings):
    """The queue of submitted runs, the places that runners may use, and the webhooks."""

    file_queue: str = Field(min_length=1, description="Name of the queue of submitted runs.")
    file_run_ttl: int = Field(ge=60, le=1_000_000_000)
    runner_read: Names = Field(description="Folders and URLs that runs may read from, separated by commas.")
    runner_write: Names = Field(description="Folders and URLs that runs may write to, separated by commas.")
    webhook_secret: Annotated[str | None, BeforeValidator(read_secret), BeforeValidator(without_line_end)]
    webhook_hosts: Names
    webhook_seconds: float = Field(gt=0)
