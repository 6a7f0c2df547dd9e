"""The small HTTP server of workers, runners and exporter."""

from __future__ import annotations

import socket
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, make_wsgi_app

from rankmill.jobs.runtime import http
from rankmill.jobs.runtime.http import answer, paths, serve
from tests.harness.tools import free_port

ALIVE = answer(lambda: (HTTPStatus.OK, "alive"))


def asked(port: int, method: str, path: str) -> tuple[int, str | None, bytes]:
    """Status, length as the headers say, and body."""
    line = HTTPConnection("127.0.0.1", port, timeout=60)
    line.request(method, path)
    reply = line.getresponse()
    found = reply.status, reply.getheader("content-length"), reply.read()
    line.close()
    return found


def test_head_is_answered_as_get_without_a_body() -> None:
    apps = {"/metrics": make_wsgi_app(CollectorRegistry()), "/healthz": ALIVE}
    _, port = serve(paths(apps), "metrics_address", "127.0.0.1:0")
    assert asked(port, "HEAD", "/metrics") == (200, None, b"")  # the length of its body is not known
    for path, status in (("/healthz", 200), ("/other", 404)):
        whole = asked(port, "GET", path)
        assert whole[0] == status
        assert asked(port, "HEAD", path) == (status, whole[1], b"")


@pytest.mark.parametrize(("names", "is_told"), [(None, False), (["known"], True)])
def test_a_setting_is_named_only_where_it_counts(names: list[str] | None, is_told: bool) -> None:
    _, port = serve(ALIVE, "metrics_address", "127.0.0.1:0", names)
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as line:
        line.request("GET", "/", headers={"Host": "evil.example"})
        reply = line.getresponse()
        assert (reply.status, b"exporter_hosts" in reply.read()) == (403, is_told)


def test_who_looks_for_a_free_port_leaves_those_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(http, "SERVICE_PORTS", {first + 1, first + 2})
    with socket.create_server(("127.0.0.1", first)):
        _, found = serve(ALIVE, "metrics_address", f"127.0.0.1:{first}", ports=100)
        assert found > first + 2
    asked_for = f"127.0.0.1:{first + 1}"
    assert serve(ALIVE, "metrics_address", asked_for, ports=100)[1] == first + 1
