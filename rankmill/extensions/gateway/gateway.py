"""The gateway's parts, made once for a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Literal, Protocol

from rankmill.cluster.orders import order_workers, reachable
from rankmill.cluster.snapshot import read_cluster
from rankmill.extensions.batches.service import Batches
from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.bodies import BodyMemory
from rankmill.extensions.gateway.keys.admission import FOR_ADMINS, MOST_WAIT, Admission, KeysNeeded, key_text
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.load_shedding import LoadShedder
from rankmill.extensions.gateway.observation import Observation
from rankmill.extensions.gateway.refusals import EXPECTED, Refusal
from rankmill.extensions.gateway.score_request import RequestScores
from rankmill.extensions.gateway.scoring import Scoring, ServedModels
from rankmill.extensions.registry.store import RegistryStore
from rankmill.jobs.runtime.connection import client_for, impatient
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.aio.connection import LoopRedis

_SWEEP_SECONDS = 3600

_WARM_SECONDS = 10.0

_END_SECONDS = 5.0
"""Longest time that requests take to cancel their runs, at the end."""

Right = Literal["admin", "manage_models"]
"""Rights of a key, apart from scoring."""

_RIGHTS: dict[Right, str] = {
    "admin": FOR_ADMINS,
    "manage_models": "this needs a key that manages models",
}

logger = logging.getLogger(__name__)


class Stoppable(Protocol):
    """A server beside HTTP's."""

    def stop(self) -> Awaitable[None]:
        """Take no more calls; done when those in progress have ended."""


class Gateway:
    """All that the paths of the gateway share. It belongs to the event loop that uses it first.

    Parameters
    ----------
    settings, redis_url
        The settings, and the server whose workers score.
    needed
        Whether a request must have a key.

    Attributes
    ----------
    redis, plain_redis
        A client whose commands wait in the event loop; one for threads, whose commands do not wait for a
        server that cannot serve.
    """

    def __init__(self, settings: Settings, redis_url: str, needed: KeysNeeded) -> None:
        self.settings = settings
        self.created = int(system.now())
        self.redis = LoopRedis(redis_url, settings.redis_wait_seconds)
        self.plain_redis = impatient(client_for(redis_url, settings.redis_wait_seconds))
        self.admission = Admission(
            self.redis, lease_seconds=settings.lease_seconds, needed=needed, fixed=settings.gateway_api_key
        )
        self.bodies = BodyMemory(settings.gateway_body_mib << 20)
        self.served = ServedModels(settings)
        self.load = LoadShedder(settings, self.redis)
        self.scoring = Scoring(settings, redis_url, self.served, self.admission, self.load)
        self.batches = Batches(settings, redis_url) if settings.gateway_files else None
        self.registry = RegistryStore(settings.registry) if settings.registry else None
        self.names = {model.model: model.name for model in self.served.all if "/" in model.model}
        """What callers call paths and URLs that messages name."""
        if self.registry:
            url = self.registry.url
            self.names |= {f"the registry {url}": "the registry", url: "the registry"}
        self.grpc: Stoppable | None = None
        self.is_stopping = False
        self._needed = needed

    async def identify(self, note: Observation, headers: Mapping[str, str]) -> ApiKey | None:
        """The key in a request's headers; raises `Refusal` if it needs one and has none."""
        key = await self.admission.identify(key_text(headers))
        if key:
            note.key = key.name
        return key

    def require(self, key: ApiKey | None, right: Right) -> None:
        """Let a caller through whose key allows more than scores.

        Raises
        ------
        Refusal
            It does not; without keys, the gateway serves everybody, not only this host.
        """
        if not (getattr(key, right) if key else self._needed == "if there are any"):
            raise Refusal("forbidden", _RIGHTS[right])

    @asynccontextmanager
    async def admitted(self, note: Observation, headers: Mapping[str, str]) -> AsyncIterator[ApiKey | None]:
        """Let a request for scores in, before its body is read; it is in progress within the block.

        Raises
        ------
        Refusal
            There is no room for it, it needs a key and has none, or the key has enough requests in progress.
        """
        with self.load.request():
            key = await self.identify(note, headers)
            async with self.admission.admitted(key):
                yield key

    def count(self, note: Observation, scores: RequestScores) -> None:
        """Count a request that was scored."""
        pairs = len(scores.scores)
        metrics.pairs.labels(note.dialect, note.key).inc(pairs)
        for stage, seconds in scores.stages().items():
            metrics.stages.labels(stage).observe(seconds)

    async def sweep(self) -> None:
        """Once an hour, delete the bytes of files and batches that have expired."""
        while self.batches:
            try:
                with waiting(most=MOST_WAIT):  # the end of the process waits for the thread
                    await asyncio.to_thread(self.batches.sweep)
            except (*EXPECTED, OSError) as error:
                logger.warning("expired files are not deleted yet: %s", error)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def warm(self) -> None:
        """While no worker has the gateway's model, have one load it, without waiting for a request."""
        while True:
            try:
                if self.load.unready:
                    await asyncio.to_thread(self._order_warm)
            except EXPECTED as error:
                logger.debug("no worker is told to load the model: %s", error)
            await asyncio.sleep(_WARM_SECONDS)

    def _order_warm(self) -> None:
        workers = reachable(
            worker
            for worker in read_cluster(self.plain_redis).workers
            if self.settings.queue in worker.queues
        )
        if workers:
            order_workers(
                self.plain_redis, workers[:1], "warm", self.served.default.model,
                wait_seconds=_WARM_SECONDS,
            )  # fmt: skip

    def stop(self) -> None:
        """Take no more gRPC calls, as HTTP takes no more requests, and end what would go on by itself."""
        self.is_stopping = True
        if self.grpc:
            self.grpc.stop()

    async def close(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait for the last gRPC calls and the end of cancelled requests, end `tasks`, and disconnect."""
        if self.grpc:
            await self.grpc.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                while self.load.requests:  # they cancel their runs
                    await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.admission.close()
        await self.scoring.client.close()
        await self.redis.loop_client.aclose()
