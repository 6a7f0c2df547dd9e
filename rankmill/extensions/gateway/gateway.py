"""The gateway's shared parts, and the base class for extensions that add paths or work to the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Literal, TypeVar

from fastapi import APIRouter

from rankmill import plugins
from rankmill.cluster.orders import order_workers, reachable
from rankmill.cluster.snapshot import WorkerState, read_cluster
from rankmill.extensions.gateway import metrics
from rankmill.extensions.gateway.bodies import BodyMemory
from rankmill.extensions.gateway.keys.admission import FOR_ADMINS, Admission, KeysNeeded, key_text
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.load_shedding import LoadShedder
from rankmill.extensions.gateway.observation import Observation
from rankmill.extensions.gateway.refusals import EXPECTED, Refusal
from rankmill.extensions.gateway.score_request import RequestScores
from rankmill.extensions.gateway.scoring import Scoring, ServedModels
from rankmill.extensions.gateway.settings import GatewaySettings
from rankmill.jobs.runtime.connection import client_for, impatient
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.aio.connection import LoopRedis

_WARM_SECONDS, _WARM_FIRST_SECONDS = 10.0, 1.0
"""Seconds between two checks whether a worker must load the model: the first number counts while there are
workers, the second while there are none.
"""

_END_SECONDS = 5.0
"""When the gateway ends, it waits at most this many seconds for the last requests to cancel their runs."""

Right = Literal["admin", "manage_models"]

_RIGHTS: dict[Right, str] = {
    "admin": FOR_ADMINS,
    "manage_models": "this needs a key that manages models",
}

logger = logging.getLogger(__name__)


class Addition:
    """The base class for what an extension adds to the gateway.

    An extension overrides the methods that it needs, and names its class in an entry point of the group
    ``rankmill.routes``. Each gateway has one object of each class.

    Attributes
    ----------
    router
        The router of the extension's paths, made by
        `rankmill.extensions.gateway.http.dependencies.new_router`. The function of a path gets the gateway
        through a parameter of the type ``TheGateway``.
    hosts
        The addresses on which the addition itself listens. If one is not a loopback address, all requests
        need keys, unless the setting ``gateway_open`` is true.
    keeps_data
        Whether the addition keeps data in Redis that exists nowhere else.

    Parameters
    ----------
    settings
        The settings of the gateway's process.

    Raises
    ------
    ConfigError
        A setting is not valid.
    """

    router: APIRouter | None = None
    hosts: Sequence[str] = ()
    keeps_data = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def attach(self, gateway: Gateway) -> None:
        """Keep the parts of `gateway` that this extension uses. Called once, before the first request."""

    def advice(self, redis_url: str) -> str | None:
        """Return a line that tells the user of ``rankmill serve --embedded`` what else to start, or ``None``.

        Parameters
        ----------
        redis_url
            URL of the embedded server.
        """
        return None

    async def listen(self) -> str | None:
        """Listen on the extension's own address, for example for gRPC, and return this address as text.

        Returns ``None`` if the extension has only paths of the gateway, and no address of its own.

        Raises
        ------
        ConfigError
            The process cannot listen at the address.
        """
        return None

    async def work(self) -> None:
        """Do the extension's work in the background, if it has any. The gateway runs this method as a task,
        and cancels the task when the gateway ends.
        """

    def stop(self) -> None:
        """Accept no more requests, because the gateway is about to end."""

    async def close(self) -> None:
        """Wait for the end of the extension's work that is in progress."""


def load_additions(settings: Settings) -> list[Addition]:
    """Make the additions of all installed extensions, for one gateway.

    Raises
    ------
    ConfigError
        A setting is not valid, or an extension cannot be imported.
    """
    return [kind(settings) for kind in plugins.load_all("rankmill.routes")]


@contextmanager
def _by_itself(addition: Addition) -> Iterator[None]:
    """Log any error that an extension's `addition` raises in the ``with`` block, and do not raise it again:
    the gateway and the other extensions continue.
    """
    try:
        yield
    except Exception:
        logger.exception("%s, an addition to the gateway, has failed", type(addition).__name__)


A = TypeVar("A", bound=Addition)
T = TypeVar("T")


async def in_own_thread(work: Callable[..., T], *given: Any) -> T:
    """Call `work` in a thread of its own. The process can end without waiting for this thread."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(*given))
        except BaseException as error:
            future.set_exception(error)

    system.Thread(target=run, name="models", daemon=True).start()
    return await asyncio.wrap_future(future)


class Gateway:
    """The parts of the gateway that all paths share. Use a `Gateway` in one event loop only.

    Parameters
    ----------
    settings, redis_url
        The settings, and the URL of the server whose workers score.
    needed
        When requests need an API key: ``always``, only ``if there are any`` keys, or ``never``.
    additions
        What extensions add to the gateway. The default is the additions of all installed extensions.

    Attributes
    ----------
    own
        The gateway's own settings.
    redis, plain_redis
        Two clients of the server. The commands of `redis` wait in the event loop. The commands of
        `plain_redis` are for threads, and fail soon if the server does not answer.
    names
        Private paths and URLs, each with the text that callers see in its place; extensions add their own.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        needed: KeysNeeded,
        additions: Sequence[Addition] | None = None,
    ) -> None:
        self.settings = settings
        self.own = own = settings.of(GatewaySettings)
        self.redis_url = redis_url
        self.created = int(system.now())
        self.redis = LoopRedis(redis_url, settings.redis_wait_seconds)
        self.plain_redis = impatient(client_for(redis_url, settings.redis_wait_seconds))
        self.admission = Admission(
            self.redis, lease_seconds=settings.lease_seconds, needed=needed, fixed=own.gateway_api_key
        )
        self.bodies = BodyMemory(own.gateway_body_mib << 20)
        self.served = ServedModels(settings)
        self.load = LoadShedder(settings, self.redis)
        self.scoring = Scoring(settings, redis_url, self.served, self.admission, self.load)
        self.names = {model.model: model.name for model in self.served.all if "/" in model.model}
        self.is_stopping = False
        self._needed = needed
        self.additions = load_additions(settings) if additions is None else additions
        for addition in self.additions:
            addition.attach(self)

    def addition(self, kind: type[A]) -> A:
        return next(addition for addition in self.additions if isinstance(addition, kind))

    async def identify(self, note: Observation, headers: Mapping[str, str]) -> ApiKey | None:
        """Find the valid API key in a request's headers, and write the key's name into `note`.

        A request without a valid key gets ``None`` if it needs no key; otherwise `Refusal` is raised.
        """
        key = await self.admission.identify(key_text(headers))
        if key:
            note.key = key.name
        return key

    def require(self, key: ApiKey | None, right: Right) -> None:
        """Check that a caller's key has a `right`, such as ``admin``.

        If no keys exist, callers without a key have all rights, unless the gateway is open to everyone (the
        setting ``gateway_open``).

        Raises
        ------
        Refusal
            The caller does not have the right.
        """
        if not (getattr(key, right) if key else self._needed == "if there are any"):
            raise Refusal("forbidden", _RIGHTS[right])

    @asynccontextmanager
    async def admitted(self, note: Observation, headers: Mapping[str, str]) -> AsyncIterator[ApiKey | None]:
        """Admit a request for scores before its body is read. The request is in progress until the block
        ends.

        Raises
        ------
        Refusal
            The gateway is overloaded, a needed API key is missing or unknown, or the key has too many
            requests in progress.
        """
        with self.load.request():
            key = await self.identify(note, headers)
            async with self.admission.admitted(key):
                yield key

    def count(self, note: Observation, scores: RequestScores) -> None:
        pairs = len(scores.scores)
        metrics.pairs.labels(note.dialect, note.key).inc(pairs)
        for stage, seconds in scores.stages().items():
            metrics.stages.labels(stage).observe(seconds)

    async def work(self, addition: Addition) -> None:
        with _by_itself(addition):
            await addition.work()

    async def warm(self) -> None:
        """Tell a worker to load the gateway's model whenever no worker has it. Never returns."""
        while True:
            try:
                if self.load.workers and self.load.unready:
                    await asyncio.to_thread(self._order_warm)
            except EXPECTED as error:
                logger.debug("no worker is told to load the model: %s", error)
            await asyncio.sleep(_WARM_SECONDS if self.load.workers else _WARM_FIRST_SECONDS)

    def _order_warm(self) -> None:
        workers = reachable(self.workers())[:1]
        order_workers(self.plain_redis, workers, "warm", self.served.default.model, wait_seconds=0)

    def workers(self) -> list[WorkerState]:
        """Read the workers of the gateway's queue from Redis."""
        workers = read_cluster(self.plain_redis).workers
        return [worker for worker in workers if self.settings.queue in worker.queues]

    def stop(self) -> None:
        self.is_stopping = True
        for addition in self.additions:
            with _by_itself(addition):
                addition.stop()

    async def close(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait until the extensions' additions have ended, and a few seconds for the requests in progress.
        Then cancel `tasks`, and disconnect from Redis.
        """
        for addition in self.additions:
            with _by_itself(addition):
                await addition.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                while self.load.requests:  # requests that were cut off still cancel their runs
                    await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.scoring.client.close()
        await self.redis.loop_client.aclose()
