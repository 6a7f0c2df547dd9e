"""The settings of gRPC."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings


class GrpcSettings(ExtensionSettings):
    """The address on which the gateway listens for gRPC, and its certificate."""

    gateway_grpc_address: str = Field(min_length=1)
    gateway_grpc_cert: str | None = Field(min_length=1)
    gateway_grpc_key: str | None = Field(min_length=1)
    gateway_grpc_client_ca: str | None = Field(min_length=1)
