"""The registry's settings."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings


class RegistrySettings(ExtensionSettings):
    """The folder or URL of a registry, and the size of the largest model that a gateway accepts for it."""

    of_workers = True

    registry: str | None = Field(min_length=1, description="Folder or URL of the registry.")
    gateway_model_gib: float = Field(gt=0, allow_inf_nan=False)
