"""What counts as a server that cannot serve, and how long is waited for it."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import redis
from redis.exceptions import ExecAbortError, NoPermissionError

from benchmarks.outages import full, replica
from jobs.errors import RedisUnavailable
from jobs.runtime.connection import client_for
from jobs.runtime.patience import cannot_serve, waiting
from tests.conftest import Server

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
    assert cannot_serve(error) == reason


@pytest.mark.parametrize(("outage", "reply"), [(full, "OOM"), (replica, "READONLY")])
def test_commands_wait_until_the_server_can_serve(
    outage: object, reply: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="jobs")  # whatever tests before have left
    client = client_for(server.url, 30)
    with outage(server.client):  # type: ignore[operator]
        setting = threading.Thread(target=lambda: client.set("a", 1))
        setting.start()
        with client.pipeline() as pipe:
            pipe.rpush("list", 1)
            pipe.incr("number")
            pushing = threading.Thread(target=pipe.execute)
            pushing.start()
            time.sleep(0.5)
            assert setting.is_alive()
            assert pushing.is_alive()
            assert f"Redis cannot serve, waiting for it (30 s at most): {reply} " in caplog.text
        assert client.connection_pool.connection_kwargs["retry"].trouble.startswith(reply)
    setting.join(10)
    pushing.join(10)
    assert client.get("a") == b"1"
    assert client.lrange("list", 0, -1) == [b"1"]  # once
    assert client.connection_pool.connection_kwargs["retry"].trouble is None


def test_the_wait_has_an_end(server: Server) -> None:
    client = client_for(server.url, 0.5)
    with full(server.client), pytest.raises(RedisUnavailable, match="Redis cannot serve: OOM command not"):
        client.set("a", 1)
    with pytest.raises(RedisUnavailable, match="Redis cannot serve: Error 2 connecting"):
        client_for("unix:///nowhere", 0.1).ping()


def test_whoever_waits_looks_around(server: Server) -> None:
    client = client_for(server.url, 60)

    def look() -> None:
        with pytest.raises(RedisUnavailable):
            client.set("b", 1)  # commands do not wait in here
        raise KeyboardInterrupt

    started = time.monotonic()
    with full(server.client), pytest.raises(KeyboardInterrupt), waiting(look=look):
        client.set("a", 1)
    assert time.monotonic() - started < 2
