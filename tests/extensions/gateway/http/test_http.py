"""A running gateway with a real worker, by HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import urllib.request
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from rankmill import Client
from rankmill.extensions.gateway.dialects.routes import dialects, score_paths
from tests.harness.gateways import PAIR, Reply, Running
from tests.harness.processes import wait_for
from tests.harness.servers.valkey import Server, nothing_left

QUERY, TEXTS = PAIR
PATHS = sorted(route.path for route in score_paths() if "rerank" in route.path and "tei" not in route.path)


def best_of(reply: Reply) -> int:
    """The place of the best text, in any dialect's answer."""
    assert reply.status == 200, reply.body
    found = reply.json
    ranking = found if isinstance(found, list) else found.get("results") or found["data"]
    return int(ranking[0]["index"])


def test_every_dialect_ranks_with_the_workers_scores(gateway: Running, shared_queue: Server) -> None:
    documents = {"query": QUERY, "documents": TEXTS, "model": "demo"}
    for path in PATHS:
        assert best_of(gateway.post(path, documents)) == 1, path
    for path in ("/rerank", "/tei/rerank"):
        assert best_of(gateway.post(path, {"query": QUERY, "texts": TEXTS})) == 1
    client = Client(shared_queue.url, model="demo")
    expected = client.score([(QUERY, text) for text in TEXTS], activation="default").tolist()
    for path in ("/score", "/v1/score"):
        reply = gateway.post(path, {"queries": QUERY, "documents": TEXTS})
        assert [each["score"] for each in reply.json["data"]] == pytest.approx(expected)
        assert reply.json["usage"]["total_tokens"] > 20
    raw = client.score([(QUERY, text) for text in TEXTS], activation="identity").tolist()
    predicted = gateway.post(
        "/predict", {"inputs": [[QUERY, text] for text in TEXTS], "raw_scores": True}
    ).json
    assert [each["score"] for (each,) in predicted] == pytest.approx(raw)
    client.close()


def test_an_answer_says_where_its_time_went(gateway: Running) -> None:
    reply = gateway.post("/score", {"queries": QUERY, "documents": TEXTS})
    parts = [each.split(";dur=") for each in reply.headers["server-timing"].split(", ")]
    took = {name: float(milliseconds) for name, milliseconds in parts}
    assert took.keys() == {"queue", "work", "tokenize", "forward"}
    assert 0 < took["forward"] <= took["work"]
    shown = gateway.get("/metrics").body.decode()
    for stage in ("admission", *took):
        assert f'rankmill_gateway_stage_seconds_count{{stage="{stage}"}}' in shown


def test_models_and_info(gateway: Running) -> None:
    assert next(each["id"] for each in gateway.get("/v1/models").json["data"]) == "demo"
    info = gateway.get("/info").json
    assert (info["model_id"], info["max_client_batch_size"]) == ("demo", 100_000)
    integers = ["max_input_length", "max_batch_tokens", "tokenization_workers", "max_concurrent_requests"]
    assert {type(info[name]) for name in integers} == {int}
    assert info["served_model_name"] == "demo"


def test_the_gateway_is_ready_once_a_worker_has_its_model(gateway: Running) -> None:
    wait_for(lambda: gateway.get("/ready").status == 200)


@pytest.mark.parametrize("name", dialects())
def test_a_prefix_is_a_whole_address(gateway: Running, name: str) -> None:
    for path in ("/health", "/ping", "/version", "/metrics", "/info", "/v1/models/demo"):
        reply = gateway.get(f"/{name}{path}")
        assert (reply.status, reply.body[:20]) == (200, gateway.get(path).body[:20]), path
    for path in ("/models", "/v1/models"):
        found = gateway.get(f"/{name}{path}").json
        assert (found["data"][0]["id"], found["data"][0]["owned_by"]) == ("demo", name)  # infinity's client
        assert isinstance(found["data"][0]["stats"]["queue_absolute"], int)  # infinity's client
        assert found["models"][0]["name"] == "demo"  # Cohere's
        assert "rerank" in found["models"][0]["endpoints"]
    assert gateway.get(f"/{name}/v1/models/other").status == 404


def test_a_model_in_a_directory_is_called_by_its_last_part(gateway: Running, tiny_model: Path) -> None:
    names = [each["id"] for each in gateway.get("/models").json["data"]]
    assert names == ["demo", tiny_model.name]
    body = {"query": QUERY, "documents": TEXTS, "model": tiny_model.name}
    reply = gateway.post("/jina/v1/rerank", body)
    assert (reply.status, reply.json["model"]) == (200, tiny_model.name)
    assert str(tiny_model) not in gateway.get("/models").body.decode()


def test_json_beside_events_is_answered_with_json(gateway: Running) -> None:
    body = {"query": QUERY, "texts": TEXTS}
    both = gateway.post("/rerank", body, accept="application/json, text/event-stream")
    assert both.headers["content-type"] == "application/json"
    events = gateway.post("/rerank", body, accept="text/event-stream; charset=utf-8")
    assert events.headers["content-type"].startswith("text/event-stream")


def test_answers_and_info_say_how_scores_were_made(gateway: Running) -> None:
    reply = gateway.post("/score", {"queries": QUERY, "documents": TEXTS})
    names = ("precision", "backend", "device", "revision", "bound")
    made = {name: reply.headers[f"x-score-{name}"] for name in names}
    assert (made["device"], len(made["revision"])) == ("cpu", 64)
    assert float(made["bound"]) > 0
    assert gateway.get("/info").json["scores"] == made


@pytest.mark.parametrize(
    ("path", "body", "status", "shown"),
    [
        ("/rerank", {"query": "q"}, 422, r'"error":"texts: Field required","error_type":"Validation"'),
        ("/rerank", {"query": "q", "texts": []}, 400, '"error_type":"Empty"'),
        ("/cohere/v2/rerank", {"query": "q"}, 400, '"message":"documents: Field required"'),
        ("/jina/v1/rerank", {"query": "q"}, 422, '"detail":"documents: Field required"'),
        (
            "/jina/v1/rerank",
            {"query": "q", "documents": [{"a": 1}]},
            422,
            '"documents.0.text: Field required"',
        ),
        ("/tei/predict", {"inputs": ["a", ["b"]]}, 422, '"inputs.1: Input should be a valid string"'),
        ("/infinity/rerank", {"query": "q", "documents": []}, 422, '"param":"documents","code":422'),
        ("/v1/score", {"queries": "q"}, 400, '"type":"BadRequestError"'),
        ("/v2/rerank", {"query": "q", "documents": ["a"], "model": "other"}, 404, "this gateway serves demo"),
        ("/v1/rerank", b"{", 400, "not JSON"),
        ("/rerank", b"[" * 1000, 422, "not JSON"),
    ],
)
def test_errors_have_the_form_of_their_dialect(
    gateway: Running, path: str, body: Any, status: int, shown: str
) -> None:
    reply = gateway.post(path, body)
    assert (reply.status, shown in reply.body.decode()) == (status, True), reply.body


@pytest.mark.parametrize(
    ("method", "path", "status", "fields"),
    [
        ("GET", "/rerank", 405, {"error", "error_type"}),
        ("GET", "/cohere/v2/rerank", 405, {"message"}),
        ("GET", "/tei/nowhere", 404, {"error", "error_type"}),
        ("GET", "/jina/nowhere", 404, {"detail"}),
        ("PUT", "/nowhere", 404, {"message", "detail", "error"}),
        ("POST", "/health", 405, {"message", "detail", "error"}),
    ],
)
def test_what_is_not_there_is_told_in_the_form_of_its_dialect(
    gateway: Running, method: str, path: str, status: int, fields: set[str]
) -> None:
    reply = gateway.send(urllib.request.Request(gateway.url + path, method=method))
    assert (reply.status, reply.json.keys()) == (status, fields)
    assert path in reply.body.decode()
    assert ("allow" in reply.headers) == (status == 405)


def test_head_is_answered_as_get_without_a_body(gateway: Running) -> None:
    reply = gateway.send(urllib.request.Request(f"{gateway.url}/health", method="HEAD"))
    assert (reply.status, reply.body) == (200, b"")
    assert int(reply.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "path", ["/v1/rerank/", "//v1/rerank", "/vllm/v1/rerank/", "/health/", "/tei/metrics/"]
)
def test_a_slash_too_many_means_nothing(gateway: Running, path: str) -> None:
    """A redirect would lead clients from TLS to http://, and many do not follow one with their body."""
    line = HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
    with closing(line):
        body = json.dumps({"query": QUERY, "documents": TEXTS}) if "rerank" in path else None
        headers = {"Content-Type": "application/json", "X-Forwarded-Proto": "https"}
        line.request("POST" if body else "GET", path, body, headers)
        reply = line.getresponse()
        assert (reply.status, reply.getheader("location")) == (200, None), reply.read()


def test_a_page_whose_files_lie_beside_it_has_one_address(gateway: Running) -> None:
    line = HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
    with closing(line):
        line.request("GET", "/docs/")
        reply = line.getresponse()
        assert (reply.status, reply.getheader("location")) == (307, "../docs")
    assert b"swagger" in gateway.get("/docs/").body


def test_a_head_without_an_end_is_not_kept(gateway: Running) -> None:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: ")
        with contextlib.suppress(ConnectionError):  # it has answered, and closed the connection meanwhile
            for _ in range(1000):
                line.sendall(b"y" * 65536)
            raise AssertionError("64 MiB of headers were taken")


def test_what_is_not_json_by_its_type_is_not_read(gateway: Running) -> None:
    body = {"query": QUERY, "texts": TEXTS}
    assert gateway.post("/rerank", body, content_type="text/plain").status == 415
    assert gateway.post("/rerank", body, content_type="application/json; charset=utf-8").status == 200
    assert gateway.post("/rerank", body, content_encoding="gzip").status == 415


def test_a_body_that_says_or_shows_that_it_is_too_large_is_not_read(gateway: Running) -> None:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    for head, rest in (
        (b"Content-Length: 99999999999999\r\n\r\n", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n", (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 40),
    ):
        with socket.create_connection((host, int(port)), timeout=60) as line:
            line.sendall(
                b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + head
            )
            try:
                line.sendall(rest)
                answer = b"".join(iter(lambda: line.recv(65536), b""))
            except ConnectionError:  # it has answered, and closed the connection meanwhile
                continue
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"larger than 32 MiB" in answer


def events_of(reply: Reply) -> list[tuple[str, Any]]:
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", reply.body.decode())
    return [(name, json.loads(data)) for name, data in found]


@pytest.mark.slow
def test_a_stream_has_scores_as_chunks_are_done_and_then_the_ranking(
    gateway: Running, tiny_model: Path
) -> None:
    documents = [f"text {number}" for number in range(10_000)]
    body = {"query": QUERY, "documents": documents, "model": str(tiny_model), "stream": True}
    reply = gateway.post("/cohere/v2/rerank", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, (last, result) = events_of(reply)
    assert len(parts) > 1
    assert {name for name, _ in parts} == {"scores"}
    scores: dict[int, float] = {}
    for _, part in parts:
        assert part["first"] == len(scores)
        scores |= dict(enumerate(part["scores"], part["first"]))
    assert last == "result"
    assert len(scores) == len(documents)
    ranking = [each["relevance_score"] for each in result["results"]]
    assert ranking == sorted(ranking, reverse=True)
    assert {each["index"]: each["relevance_score"] for each in result["results"]} == scores
    asked_for = gateway.post("/score", {"queries": "q", "documents": "a"}, accept="text/event-stream")
    assert [name for name, _ in events_of(asked_for)] == ["scores", "result"]
    refused = gateway.post("/score", {"queries": "q", "documents": [], "stream": True})
    assert refused.status == 400
    long = {"query": "q", "documents": ["a"], "truncate_prompt_tokens": 10**9}
    ((name, error),) = events_of(gateway.post("/vllm/rerank", {**long, "stream": True}))
    assert (name, error["error"]["code"]) == ("error", 400)
    assert "do not fit the model" in gateway.post("/vllm/rerank", long).json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_leaves_no_run(gateway: Running, shared_queue: Server, stream: bool) -> None:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    documents = [f"words {n}" * 50 for n in range(20_000)]
    raw = json.dumps({"query": QUERY, "documents": documents, "stream": stream}).encode()
    head = "POST /v2/rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with nothing_left(shared_queue), socket.create_connection((host, int(port)), timeout=60) as line:
        before = list(shared_queue.client.scan_iter("rankmill:run:*"))
        line.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_for(lambda: list(shared_queue.client.scan_iter("rankmill:run:*")) != before)


def test_the_id_of_a_request_is_in_its_answer_and_in_the_log(gateway: Running) -> None:
    body = {"query": QUERY, "texts": TEXTS}
    assert (
        gateway.post("/rerank", body, x_request_id="my-request.1").headers["x-request-id"] == "my-request.1"
    )
    assert '"request": "my-request.1"' in gateway.log.read_text()
    made = gateway.post("/rerank", {}, x_request_id="not valid\u00e9").headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)


def test_many_requests_at_once_are_all_answered(gateway: Running) -> None:
    replies: list[Reply] = []

    def ask(number: int) -> None:
        reply = gateway.post("/score", {"queries": QUERY, "documents": [f"number {number}", *TEXTS]})
        replies.append(reply)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status for reply in replies] == [200] * 64
    assert len({tuple(each["score"] for each in reply.json["data"][1:]) for reply in replies}) >= 1


def test_metrics_count_by_route_dialect_key_and_status(gateway: Running) -> None:
    gateway.post("/jina/v1/rerank", {"query": QUERY, "documents": TEXTS})
    gateway.post("/jina/v1/rerank", {"query": QUERY})
    text = gateway.get("/metrics").body.decode()
    labels = 'dialect="jina",key="",route="/jina/v1/rerank",status='
    assert f'rankmill_gateway_requests_total{{{labels}"200"}} ' in text
    assert f'rankmill_gateway_requests_total{{{labels}"422"}} ' in text
    for stage in ("admission", "queue", "work"):
        assert f'rankmill_gateway_stage_seconds_count{{stage="{stage}"}} ' in text
    for none in ("rankmill_gateway_body_bytes 0.0", "rankmill_gateway_requests_in_progress 0.0"):
        wait_for(lambda: none in gateway.get("/metrics").body.decode())  # noqa: B023 -- it is called here
    assert 'rankmill_gateway_pairs_total{dialect="jina",key=""} ' in text


def test_names_of_other_hosts_are_refused_on_loopback(gateway: Running) -> None:
    assert gateway.get("/health", host="evil.example").status == 403
    assert gateway.get("/health", host="localhost:1").status == 200
    reply = gateway.get("/health", origin="http://evil.example")
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("second", ["Host: evil.example", "hOST: localhost"])
def test_a_request_with_two_host_headers_is_refused(gateway: Running, second: str) -> None:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        body = b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\n%b\r\nContent-Length: 2\r\n\r\n{}"
        line.sendall(body % second.encode())
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"multiple Host: headers" in answer


def test_workers_load_and_unload_models(gateway: Running) -> None:
    gateway.post("/rerank", {"query": QUERY, "texts": TEXTS})
    (worker,) = gateway.get("/v1/cache").json["data"]
    assert worker["hits"] + worker["loads"] > 0
    (done,) = gateway.post("/v1/cache/warm", {"model": "demo"}).json["data"]
    assert (done["order"], done["state"]) == ("warm", "done")
    assert gateway.post("/v1/cache/warm", {"model": "other"}).status == 404
    assert gateway.post("/v1/cache/warm", {"modle": "demo"}).status == 400
    assert gateway.post("/v1/cache/clear", b"").status == 400
    assert gateway.get("/openapi.json").json["paths"]["/v1/cache/clear"]["post"]["requestBody"]["required"]
    outcomes = gateway.post("/v1/cache/clear", {}).json["data"]
    assert {(each["order"], each["state"]) for each in outcomes} <= {("unload", "done")}


def test_without_a_registry_nothing_is_managed(gateway: Running) -> None:
    for path in ("/v1/registry", "/v1/registry/reranker/versions/v1"):
        reply = gateway.get(path)
        assert reply.status == 404
        assert "this gateway has no registry" in reply.json["message"]
