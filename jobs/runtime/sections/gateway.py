"""Settings of the gateway (``rankmill serve``); see ``configs/base.yaml`` for what each one means."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def names(value: Any) -> Any:
    """Split names that are separated by commas, as in an environment variable."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(names)]


class GatewaySettings(BaseModel):
    """Where the gateway listens, whom it serves, and what it takes on."""

    model_config = ConfigDict(defer_build=True)  # only `Settings`, which has its fields, is built

    gateway_address: str = Field(min_length=1)
    gateway_grpc_address: str = Field(min_length=1)
    gateway_grpc_cert: str | None = Field(min_length=1)
    gateway_grpc_key: str | None = Field(min_length=1)
    gateway_grpc_client_ca: str | None = Field(min_length=1)
    gateway_open: bool
    gateway_models: Names
    gateway_hosts: Names
    gateway_origins: Names
    gateway_body_mib: int = Field(ge=1, le=1024)
    gateway_pairs: int = Field(ge=1)
    gateway_requests: int = Field(ge=1)
    gateway_backlog_seconds: float = Field(gt=0)
    gateway_request_seconds: float = Field(gt=0)
    gateway_stop_seconds: float = Field(ge=0)
    gateway_files: str | None = Field(min_length=1)
    gateway_file_mib: int = Field(ge=1)
    gateway_files_gib: float = Field(gt=0)
    gateway_model_gib: float = Field(gt=0)
