"""The gateway's settings."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings, HeaderKey, Names


class GatewaySettings(ExtensionSettings):
    """Addresses, keys, models and limits of the gateway."""

    gateway_address: str = Field(min_length=1, description="HOST or HOST:PORT to listen on.")
    gateway_open: bool = Field(description="Serve everyone who reaches the address, without a key.")
    gateway_open_metrics: bool
    gateway_api_key: HeaderKey
    gateway_models: Names
    gateway_dialect: str | None = Field(min_length=1)
    gateway_hosts: Names
    gateway_origins: Names
    gateway_body_mib: int = Field(ge=1, le=1024)
    gateway_pairs: int = Field(ge=1)
    gateway_requests: int = Field(ge=1)
    gateway_backlog_seconds: float = Field(gt=0)
    gateway_request_seconds: float = Field(gt=0)
    gateway_stop_seconds: float = Field(ge=0, allow_inf_nan=False)


def name_and_model(entry: str) -> tuple[str, str]:
    """Split an entry of ``gateway_models`` into the name for callers and the model. The name is empty if the
    entry gives none.

    The ``=`` in a path such as ``/data/epoch=3`` does not end a name, because names have no slash.
    """
    name, _, model = entry.partition("=")
    return (name, model) if model and "/" not in name else ("", entry)
