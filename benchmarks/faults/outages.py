"""Makes servers that answer but cannot serve, such as full or busy servers, and replicas."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis


@contextmanager
def full(client: Any) -> Iterator[None]:
    """The server's memory is used up, and it evicts nothing."""
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


@contextmanager
def replica(client: Any) -> Iterator[None]:
    """The server is a replica of an unreachable master, as in the middle of a failover."""
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        client.execute_command("REPLICAOF", "NO", "ONE")


@contextmanager
def locked(client: Any) -> Iterator[None]:
    """The server requires another password; only the connections of `client` stay usable."""
    client.acl_setuser("keeper", enabled=True, nopass=True, keys=["*"], channels=["*"], categories=["+@all"])
    client.execute_command("AUTH", "keeper", "any")
    client.config_set("requirepass", "another")
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    try:
        yield
    finally:
        client.config_set("requirepass", "")


@contextmanager
def stale(client: Any) -> Iterator[None]:
    """The server is a replica without a link to its master, and does not even answer reads."""
    client.config_set("replica-serve-stale-data", "no")
    try:
        with replica(client):
            yield
    finally:
        client.config_set("replica-serve-stale-data", "yes")


@contextmanager
def busy(client: Any) -> Iterator[None]:
    """The server runs a script that does not end."""
    client.config_set("busy-reply-threshold", 50)  # ms until the server answers other commands with BUSY
    script = threading.Thread(target=_expect_error, args=(client, "EVAL", "while true do end", "0"))
    script.start()
    try:
        yield
    finally:
        client.execute_command("SCRIPT", "KILL")
        script.join()


@contextmanager
def loading(client: Any) -> Iterator[None]:
    """The server loads its data, as after a restart; it must allow DEBUG commands."""
    with client.pipeline() as pipe:
        for number in range(10_000):
            pipe.set(f"filler:{number}", number, ex=600)
        pipe.execute()
    client.config_set("loading-process-events-interval-bytes", 1024)
    client.config_set("key-load-delay", 2000)  # microseconds
    reload = threading.Thread(target=client.execute_command, args=("DEBUG", "RELOAD"))
    reload.start()
    try:
        yield
    finally:
        client.config_set("key-load-delay", 0)
        reload.join()


def _expect_error(client: Any, *command: str) -> None:
    with suppress(redis.ResponseError):
        client.execute_command(*command)


OUTAGES = {
    "full": full,
    "replica": replica,
    "locked": locked,
    "stale": stale,
    "busy": busy,
    "loading": loading,
}
