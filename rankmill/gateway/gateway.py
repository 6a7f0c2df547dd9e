"""The gateway's parts, made once for a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request

from jobs.errors import RankmillError
from jobs.runtime.settings import Settings
from producer.aio.connection import LoopRedis
from rankmill.gateway.http.bodies import Bodies
from rankmill.gateway.keys.admission import Admission, KeysNeeded, key_text
from rankmill.gateway.keys.api_keys import ApiKey
from rankmill.gateway.refusals import refusal_of
from rankmill.gateway.scoring import Scoring

if TYPE_CHECKING:
    from rankmill.gateway.grpc.server import GrpcServer


class Gateway:
    """All that the paths of the gateway share. It belongs to the event loop that uses it first.

    Parameters
    ----------
    settings, redis_url
        The settings, and the server whose workers score.
    needed
        Whether a request must have a key.
    """

    def __init__(self, settings: Settings, redis_url: str, needed: KeysNeeded) -> None:
        self.settings = settings
        self.redis = LoopRedis(redis_url, settings.redis_wait_seconds)
        self.admission = Admission(self.redis, lease_seconds=settings.lease_seconds, needed=needed)
        self.scoring = Scoring(settings, redis_url, self.admission)
        self.bodies = Bodies(settings.gateway_body_mib << 20)
        self.grpc: GrpcServer | None = None

    async def key(self, request: Request) -> ApiKey | None:
        """The key of a request; raises `Refusal` if it needs one and has none."""
        try:
            return await self.admission.identify(key_text(request.headers))
        except RankmillError as error:
            raise refusal_of(error) from None

    async def close(self) -> None:
        """Wait for the last gRPC calls, and close the connections."""
        if self.grpc:
            await self.grpc.stop()
        await self.admission.close()
        await self.scoring.client.close()
        await self.redis.loop_client.aclose()
