"""A server that answers but cannot serve: status, page and metrics say why."""

from __future__ import annotations

import json
import urllib.request

import pytest
from click.testing import CliRunner

from benchmarks.faults.outages import OUTAGES
from rankmill.cli.main import rankmill
from rankmill.cluster.exporter import exporter_app
from rankmill.jobs.runtime.connection import impatient
from rankmill.jobs.runtime.http import serve
from rankmill.jobs.runtime.settings import load_settings
from tests.conftest import Server, wait_for


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("full", "OOM command not allowed"), pytest.param("replica", "READONLY", marks=pytest.mark.slow)],
)
def test_why_a_server_cannot_serve_is_shown_until_it_can(kind: str, reason: str, server: Server) -> None:
    """Shows: the server or its disk is full."""
    host, port = serve(
        exporter_app(impatient(server.client), load_settings()), "exporter_address", "127.0.0.1:0", ()
    )

    def page(path: str) -> str:
        with urllib.request.urlopen(f"http://{host}:{port}/{path}", timeout=10) as reply:
            return str(reply.read().decode())

    def writable() -> str:
        return page("metrics").partition("\nrankmill_redis_writable ")[2][:3]

    assert writable() == "1.0"
    with OUTAGES[kind](server.client):
        wait_for(lambda: writable() == "0.0")  # a snapshot is kept for a second
        wait_for(lambda: reason in (json.loads(page("api/cluster.json"))["cluster"]["trouble"] or ""))
        status = CliRunner().invoke(rankmill, ["status", "--redis", server.url], env={"COLUMNS": "200"})
        assert status.exit_code == 0
        assert reason in status.output
        assert "Redis takes no writes, and all wait for it" in status.output
    wait_for(lambda: writable() == "1.0")
    wait_for(lambda: json.loads(page("api/cluster.json"))["cluster"]["trouble"] is None)
