"""The registry's own settings."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings


class RegistrySettings(ExtensionSettings):
    """The setting of a registry behind a gateway: how large an uploaded model may be."""

    gateway_model_gib: float = Field(gt=0)
