"""A gateway with fake workers, for the tests of services that ask a gateway for scores.

>>> from rankmill.testing import FakeWorkers
>>> with fake_gateway(FakeWorkers()) as url:  # doctest: +SKIP
...     httpx.post(f"{url}/v1/rerank", json={"query": "q", "documents": ["a", "b"]})
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
import uvicorn
from fastapi import FastAPI

from rankmill.extensions.gateway.app import make_app
from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.keys.admission import Admission
from rankmill.extensions.gateway.load_shedding import LoadShedder
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.jobs.system import system
from rankmill.testing import URL, FakeAsyncClient, FakeWorkers

_NO_WORKERS_SECONDS = 1.0
"""A request fails after this many seconds without a worker. A real gateway waits longer; tests should be
short.
"""


def gateway_app(workers: FakeWorkers, **options: Any) -> FastAPI:
    """Make the application of ``rankmill serve``, with fake workers and without a Redis server. Use it with
    `fastapi.testclient.TestClient` in a ``with`` block: all requests need the same event loop.

    The only possible API key is the setting ``gateway_api_key``. Paths for tokens, batches, usage and
    orders to workers answer with an error.

    Parameters
    ----------
    workers
        The fake workers, which score.
    options
        Settings by name, such as ``model`` or ``gateway_models``.
    """
    settings = load_settings({**options, "redis_url": URL})
    return make_app(_FakeGateway(settings, workers))


@contextmanager
def fake_gateway(workers: FakeWorkers, **options: Any) -> Iterator[str]:
    """Serve `gateway_app` within the ``with`` block, on a free port of this host; yields its URL."""
    with served(gateway_app(workers, **options)) as url:
        yield url


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve any ASGI application within the ``with`` block, in a thread, on a free port of this host; yields
    its URL.
    """
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = system.Thread(target=server.run, args=([listener],), name="fake-gateway", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            system.sleep(0.002)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class _FakeGateway(Gateway):
    """A gateway without a Redis server."""

    def __init__(self, settings: Settings, workers: FakeWorkers) -> None:
        super().__init__(settings, URL, "if there are any")
        self.plain_redis = empty = _EmptyServer()
        self.admission = self.scoring.admission = Admission(
            empty, lease_seconds=settings.lease_seconds, needed="if there are any",
            fixed=self.own.gateway_api_key,
        )  # fmt: skip
        self.load = self.scoring.load = _Load(settings, empty, workers)
        self.scoring.client = FakeAsyncClient(
            fake_workers=workers, settings=settings, no_workers_seconds=_NO_WORKERS_SECONDS
        )


class _Load(LoadShedder):
    """A load shedder that knows only the fake workers, and never finds their queue too long."""

    def __init__(self, settings: Settings, client: redis.Redis, workers: FakeWorkers) -> None:
        super().__init__(settings, client)
        self._fake = workers

    def look(self) -> None:
        self.workers = self._fake.count
        self.unready = None if self.workers else "there is no worker"


_NOTHING: dict[str, Any] = {"PING": True, "GET": None, "ZCOUNT": 0, "ZRANGE": [], "ZREMRANGEBYSCORE": 0}


class _EmptyServer(redis.Redis):
    """A Redis client that answers as if there were no API keys, and fails at all other commands."""

    def execute_command(self, *args: Any, **_: Any) -> Any:
        if args[0] not in _NOTHING:
            raise redis.ConnectionError("a fake gateway has no server")
        return _NOTHING[args[0]]

    def pipeline(self, *_: Any, **__: Any) -> Any:
        raise redis.ConnectionError("a fake gateway has no server")


if "pytest" in sys.modules:
    import pytest

    @pytest.fixture(name="fake_gateway")
    def _fake_gateway(fake_workers: FakeWorkers) -> Iterator[str]:
        """URL of a gateway whose workers are the fixture `fake_workers`."""
        with fake_gateway(fake_workers) as url:
            yield url
