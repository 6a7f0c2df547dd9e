"""A key's requests at once: they count from their headers on, and what they only announce takes no room."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import pytest

from rankmill.extensions.gateway.keys.api_keys import KeyStore
from tests.harness.gateways import PAIR, Running, running_gateway
from tests.harness.processes import wait_for
from tests.harness.servers.valkey import Server

BODY = {"query": PAIR[0], "texts": PAIR[1]}


@pytest.fixture(scope="module")
def keyed(
    shared_queue: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, dict[str, str]]]:
    """A gateway with keys: of a tenant with one request at once, of one without limits, and an admin's."""
    store = KeyStore(shared_queue.client)
    texts = {
        "one": store.create("one", days=1, requests_at_once=1, admin=True, manage_models=True)[0],
        "many": store.create("many", days=1)[0],
        "boss": store.create("boss", days=1, admin=True)[0],
    }
    place = tmp_path_factory.mktemp("keyed")
    options = ["--model", "demo", "--grpc-address", "127.0.0.1:0", "--registry", str(place)]
    environ = {"RANKMILL_GATEWAY_FILES": str(place)}
    with running_gateway(shared_queue.url, place, *options, environ=environ) as gateway:
        yield gateway, texts
    store.revoke(texts)


def test_metrics_name_all_tenants_and_are_for_admins(
    keyed: tuple[Running, dict[str, str]], shared_queue: Server
) -> None:
    gateway, texts = keyed
    assert gateway.post("/rerank", BODY, x_api_key=texts["many"]).status == 200
    for path in ("/metrics", "/tei/metrics"):
        assert b'key="many"' in gateway.get(path, **{"x-api-key": texts["boss"]}).body
        for key, status in ((texts["many"], 403), ("", 401), ("other", 401)):
            refused = gateway.get(path, **{"x-api-key": key})
            assert refused.status == status
            assert b"this needs a key for admins" in refused.body
    store = KeyStore(shared_queue.client)
    new, made = store.create("new", days=1, admin=True)
    try:
        wait_for(lambda: gateway.get("/metrics", **{"x-api-key": new}).status == 200)
    finally:
        store.revoke([made.id])
    wait_for(lambda: gateway.get("/metrics", **{"x-api-key": new}).status == 401)


def stated(gateway: Running, path: str, key: str) -> socket.socket:
    """A connection that states a body of 32 MiB and sends nothing of it."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    line = socket.create_connection((host, int(port)), timeout=60)
    method = "PUT" if "registry/reranker" in path else "POST"
    kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
    line.sendall(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {32 << 20}\r\n\r\n".encode()
    )
    return line


@pytest.mark.parametrize(
    "path", ["/rerank", "/v1/files", "/v1/batches", "/v1/cache/warm", "/v1/registry/reranker"]
)
def test_a_request_counts_among_its_keys_from_its_headers_on(
    keyed: tuple[Running, dict[str, str]], shared_queue: Server, path: str
) -> None:
    gateway, texts = keyed
    with closing(stated(gateway, path, texts["one"])):
        wait_for(lambda: shared_queue.client.exists("rankmill:api-key-requests:one"))
        for _ in range(7):
            with closing(stated(gateway, path, texts["one"])) as line:
                assert line.recv(65536).startswith(b"HTTP/1.1 429 ")
        assert gateway.post("/rerank", BODY, x_api_key=texts["many"]).status == 200
    wait_for(lambda: not shared_queue.client.exists("rankmill:api-key-requests:one"))
    assert gateway.post("/rerank", BODY, x_api_key=texts["one"]).status == 200


def test_a_body_takes_room_only_as_it_comes(keyed: tuple[Running, dict[str, str]]) -> None:
    gateway, texts = keyed
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(closing(stated(gateway, "/rerank", texts["many"])))
        many = "in_progress 10.0"
        wait_for(lambda: many in gateway.get("/metrics", **{"x-api-key": texts["boss"]}).body.decode())
        assert gateway.post("/rerank", BODY, x_api_key=texts["boss"]).status == 200


@pytest.mark.parametrize("method", ["Rerank/Rerank", "Rerank/RerankStream", "Predict/PredictPairStream"])
def test_a_call_counts_among_its_keys_before_its_message_is_there(
    keyed: tuple[Running, dict[str, str]], shared_queue: Server, method: str
) -> None:
    gateway, texts = keyed
    found = re.search(r" at (\S+) \(gRPC\)", gateway.log.read_text())
    assert found
    held = threading.Event()

    def nothing() -> Iterator[bytes]:
        held.wait()
        yield from ()

    with ExitStack() as stack, grpc.insecure_channel(found[1]) as channel:
        stack.callback(held.set)
        call: Any = channel.stream_stream(f"/tei.v1.{method}")
        one = (("x-api-key", texts["one"]),)
        first = call(nothing(), metadata=one, timeout=60)
        wait_for(lambda: shared_queue.client.exists("rankmill:api-key-requests:one"))
        with pytest.raises(grpc.RpcError) as refused:
            list(call(nothing(), metadata=one, timeout=60))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        wait_for(lambda: not shared_queue.client.exists("rankmill:api-key-requests:one"))
