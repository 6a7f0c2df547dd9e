"""The registry's own settings."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings


class RegistrySettings(ExtensionSettings):
    """How large a model may be that is uploaded to a gateway."""

    gateway_model_gib: float = Field(gt=0)
