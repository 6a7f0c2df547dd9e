"""Adds gRPC to the gateway, on an address of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankmill.extensions.gateway.gateway import Addition, Gateway
from rankmill.extensions.grpc.settings import GrpcSettings
from rankmill.jobs.runtime.http import shown_address, split_address
from rankmill.jobs.runtime.installation import require_packages
from rankmill.jobs.runtime.settings import Settings

if TYPE_CHECKING:
    from rankmill.extensions.grpc.server import GrpcServer

PORT = 9810
"""The port of a ``gateway_grpc_address`` that does not name one."""


class GrpcListener(Addition):
    """Listens for gRPC calls, if the settings name an address."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._at: tuple[str, int] | None = None
        self._server: GrpcServer | None = None
        if (wanted := settings.of(GrpcSettings).gateway_grpc_address) != "none":
            require_packages(("grpc_health", "grpc_reflection"), "grpc", "gateway_grpc_address: gRPC")
            self._at = split_address("gateway_grpc_address", wanted, PORT)
            self.hosts = self._at[:1]

    def attach(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def listen(self) -> str | None:
        if self._at is None:
            return None
        # only a gateway with gRPC needs gRPC's packages
        from rankmill.extensions.grpc.server import GrpcServer

        self._server = GrpcServer(self._gateway)
        host, port = self._at
        return f"{shown_address(host, await self._server.start(host, port))} (gRPC)"

    def stop(self) -> None:
        if self._server:
            self._server.stop()

    async def close(self) -> None:
        if self._server:
            await self._server.stop()
