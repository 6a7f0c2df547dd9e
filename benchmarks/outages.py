"""Servers that answer but cannot serve: full, a replica, with another password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


OUTAGES = {"full": full, "replica": replica, "locked": locked}
