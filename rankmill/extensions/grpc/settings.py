"""The settings of gRPC."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings


class GrpcSettings(ExtensionSettings):
    """The gateway's address for gRPC, with its certificate, its key, and the authority for clients'
    certificates.
    """

    gateway_grpc_address: str = Field(min_length=1, description="HOST or HOST:PORT to listen on for gRPC.")
    gateway_grpc_cert: str | None = Field(min_length=1)
    gateway_grpc_key: str | None = Field(min_length=1)
    gateway_grpc_client_ca: str | None = Field(min_length=1)
