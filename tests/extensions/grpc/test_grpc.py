"""TEI's services over gRPC: the scores are those of HTTP, and who may not, may not here either."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.extensions.gateway.refusals import KINDS, Kind
from rankmill.extensions.grpc import tei_pb2 as tei
from tests.conftest import run_command
from tests.harness.gateways import PAIR, Running, running_gateway
from tests.harness.servers.valkey import Server

ROOT = Path(__file__).resolve().parents[3]
QUERY, TEXTS = PAIR
ANY_PORT = ("--grpc-address", "127.0.0.1:0", "--model", "demo")
TWO = {"RANKMILL_GATEWAY_REQUESTS": "2", "RANKMILL_GATEWAY_BODY_MIB": "1", "RANKMILL_PRECISION": "fp32"}
"""Requests at once; MiB of a message; scores that are the same in any company."""


@pytest.fixture(scope="module")
def gateway(shared_queue: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_gateway(
        shared_queue.url, tmp_path_factory.mktemp("gateway"), *ANY_PORT, environ=TWO
    ) as running:
        yield running


@pytest.fixture
def channel(gateway: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(grpc_address(gateway)) as opened:
        yield opened


def grpc_address(gateway: Running) -> str:
    found = re.search(r" at (\S+) \(gRPC\)", gateway.log.read_text())
    assert found
    return found[1]


def _written(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def call(channel: grpc.Channel, method: str, request: Any, **metadata: str) -> Any:
    """Call a method of ``tei.v1``; what is given as an iterator is sent as a stream."""
    service, name = method.split(".")
    known = tei.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    stub = kinds[known.client_streaming, known.server_streaming](
        f"/tei.v1.{service}/{name}",
        request_serializer=_written,
        response_deserializer=getattr(tei, known.output_type.name).FromString,
    )
    headers = [(key.replace("_", "-"), value) for key, value in metadata.items()]
    return stub(request, timeout=60, metadata=headers)


def refusal(channel: grpc.Channel, method: str, request: Any, **metadata: str) -> Any:
    try:
        reply = call(channel, method, request, **metadata)
        found = list(reply) if method.endswith("PairStream") else reply
    except grpc.RpcError as error:
        return error
    pytest.fail(f"{method} answered {found}")


@pytest.mark.parametrize("raw", [False, True])
def test_a_ranking_has_the_scores_of_http(gateway: Running, channel: grpc.Channel, raw: bool) -> None:
    body = {"query": QUERY, "texts": TEXTS, "raw_scores": raw}
    wanted = [
        (each["index"], pytest.approx(each["score"], abs=1e-4))  # they may have had other neighbours
        for each in gateway.post("/rerank", body).json
    ]
    whole = tei.RerankRequest(query=QUERY, texts=TEXTS, raw_scores=raw, return_text=True)
    found = call(channel, "Rerank.Rerank", whole)
    assert [(each.index, each.score) for each in found.ranks] == wanted
    assert [each.text for each in found.ranks] == [TEXTS[place] for place, _ in wanted]
    assert found.metadata.compute_tokens > 0
    assert 0 < found.metadata.inference_time_ns < found.metadata.total_time_ns
    parts = [tei.RerankStreamRequest(query=QUERY, text=text, raw_scores=raw) for text in TEXTS]
    streamed = call(channel, "Rerank.RerankStream", iter(parts))
    assert [(each.index, each.score, each.HasField("text")) for each in streamed.ranks] == [
        (*each, False) for each in wanted
    ]
    lone = call(
        channel, "Predict.PredictPair", tei.PredictPairRequest(inputs=[QUERY, TEXTS[1]], raw_scores=raw)
    )
    assert [each.score for each in lone.predictions] == [dict(wanted)[1]]


def test_texts_alone_have_the_scores_of_http(gateway: Running, channel: grpc.Channel) -> None:
    body = {"inputs": [[text] for text in TEXTS], "raw_scores": True}
    wanted = [each["score"] for (each,) in gateway.post("/predict", body).json]
    requests = [tei.PredictRequest(inputs=text, raw_scores=True) for text in TEXTS]
    for replies in (
        [call(channel, "Predict.Predict", each) for each in requests],
        call(channel, "Predict.PredictStream", iter(requests)),
    ):
        found = [(each.label, each.score) for reply in replies for each in reply.predictions]
        assert found == [("LABEL_0", pytest.approx(score, abs=1e-4)) for score in wanted]


def test_tokens_are_those_of_http(gateway: Running, channel: grpc.Channel) -> None:
    texts = [*TEXTS, "déjà vu", "moon " * 30_000, "sea " * 30_000]  # the last two are two requests
    wanted = [gateway.post("/tokenize", {"inputs": text}).json[0] for text in texts]
    requests = [tei.EncodeRequest(inputs=text, add_special_tokens=True) for text in texts]
    for replies in (
        [call(channel, "Tokenize.Tokenize", each) for each in requests],
        list(call(channel, "Tokenize.TokenizeStream", iter(requests))),
    ):
        assert [[_shown(token) for token in reply.tokens] for reply in replies] == wanted
    decodes = [
        tei.DecodeRequest(ids=[token["id"] for token in row], skip_special_tokens=skip)
        for row in wanted[:3] for skip in (True, False)
    ]  # fmt: skip
    bodies = [{"ids": list(each.ids), "skip_special_tokens": each.skip_special_tokens} for each in decodes]
    decoded = [gateway.post("/decode", body).json[0] for body in bodies]
    assert [call(channel, "Tokenize.Decode", each).text for each in decodes] == decoded
    assert [each.text for each in call(channel, "Tokenize.DecodeStream", iter(decodes))] == decoded
    assert decoded[0] != decoded[1]


def _shown(token: Any) -> dict[str, Any]:
    places = {name: getattr(token, name) if token.HasField(name) else None for name in ("start", "stop")}
    return {"id": token.id, "text": token.text, "special": token.special, **places}


def test_long_texts_are_cut_at_the_side_that_is_wanted(gateway: Running, channel: grpc.Channel) -> None:
    texts = [LONG, f"{TEXTS[1]} {LONG}", f"{LONG} {TEXTS[1]}"]
    for direction, side, cut_off in ((RIGHT, "Right", 2), (LEFT, "Left", 1)):
        body = {"query": QUERY, "texts": texts, "truncation_direction": side}
        wanted = {each["index"]: each["score"] for each in gateway.post("/rerank", body).json}
        asked = tei.RerankRequest(query=QUERY, texts=texts, truncate=True, truncation_direction=direction)
        found = {each.index: each.score for each in call(channel, "Rerank.Rerank", asked).ranks}
        assert found == pytest.approx(wanted, rel=1e-4)  # they may have had other neighbours
        assert found[cut_off] == pytest.approx(found[0], rel=1e-4)
        assert found[3 - cut_off] != pytest.approx(found[0], rel=1e-3)


def test_a_stream_of_pairs_is_answered_in_its_order(channel: grpc.Channel) -> None:
    texts = [f"{'moon ' * (number % 7)}{number}" for number in range(300)]
    requests = [tei.PredictPairRequest(inputs=[QUERY, text], raw_scores=True) for text in texts]
    replies = list(call(channel, "Predict.PredictPairStream", iter(requests)))
    found = [reply.predictions[0].score for reply in replies]
    together = call(channel, "Rerank.Rerank", tei.RerankRequest(query=QUERY, texts=texts, raw_scores=True))
    wanted = [each.score for each in sorted(together.ranks, key=lambda each: each.index)]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_messages_that_are_not_too_large_are_scored_whatever_they_are_scored_with(
    channel: grpc.Channel,
) -> None:
    """A query counts once in a message's size, and each message of a stream by itself."""
    texts = [f"moon {number}" for number in range(60)]
    asked = tei.RerankRequest(query="moon " * 4_000, texts=texts, truncate=True)
    assert len(call(channel, "Rerank.Rerank", asked).ranks) == 60
    large = [tei.PredictPairRequest(inputs=["moon " * 120_000, text], truncate=True) for text in TEXTS]
    assert len(list(call(channel, "Predict.PredictPairStream", iter(large)))) == 2


def test_each_pair_is_answered_when_it_comes(channel: grpc.Channel) -> None:
    answered: queue.Queue[float] = queue.Queue()

    def requests() -> Iterator[tei.PredictPairRequest]:
        for number in range(3):
            yield tei.PredictPairRequest(inputs=[QUERY, f"moon {number}"])
            answered.get(timeout=60)  # the next one is sent when this one is answered

    for reply in call(channel, "Predict.PredictPairStream", requests()):
        answered.put(reply.predictions[0].score)
    assert answered.empty()


def test_calls_and_requests_share_the_room_that_there_is(gateway: Running, channel: grpc.Channel) -> None:
    more: list[queue.Queue[tei.PredictPairRequest | None]] = [queue.Queue(), queue.Queue()]
    streams = [call(channel, "Predict.PredictPairStream", iter(each.get, None)) for each in more]
    for requests, stream in zip(more, streams, strict=True):
        requests.put(PAIR_REQUEST)
        next(stream)  # it is in progress
    refused = refusal(channel, "Rerank.Rerank", tei.RerankRequest(query=QUERY, texts=TEXTS))
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "retry-after" in {each.key for each in refused.trailing_metadata() or ()}
    assert gateway.post("/rerank", {"query": QUERY, "texts": TEXTS}).status == 429
    for requests, stream in zip(more, streams, strict=True):
        requests.put(None)
        assert list(stream) == []
    assert gateway.post("/rerank", {"query": QUERY, "texts": TEXTS}).status == 200


def test_calls_are_counted_as_requests_are(gateway: Running, channel: grpc.Channel) -> None:
    def counted(name: str, **labels: str) -> float:
        listed = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        found = re.search(
            rf"^{re.escape(f'rankmill_gateway_{name}{{{listed}}}')} (\S+)$",
            gateway.get("/metrics").body.decode(),
            re.MULTILINE,
        )
        return float(found[1]) if found else 0.0

    def all_counted() -> list[float]:
        route = {"route": "/tei.v1.Rerank/Rerank", "dialect": "tei"}
        return [
            counted("requests_total", **route, key="", status="OK"),
            counted("requests_total", **route, key="", status="INVALID_ARGUMENT"),
            counted("request_seconds_count", **route),
            counted("pairs_total", dialect="tei", key=""),
        ]

    before = all_counted()
    request = tei.RerankRequest(query=QUERY, texts=TEXTS)
    call(channel, "Rerank.Rerank", request)
    refused = refusal(channel, "Rerank.Rerank", tei.RerankRequest(query=QUERY), x_request_id="mine-1")
    assert {each.key: each.value for each in refused.trailing_metadata() or ()}["x-request-id"] == "mine-1"
    assert [now - then for now, then in zip(all_counted(), before, strict=True)] == [1, 1, 2, len(TEXTS)]


def test_every_kind_of_refusal_has_a_status() -> None:
    assert KINDS.keys() == set(get_args(Kind))
    assert {words.grpc for words in KINDS.values()} <= {code.name for code in grpc.StatusCode}


RIGHT, LEFT = tei.TRUNCATION_DIRECTION_RIGHT, tei.TRUNCATION_DIRECTION_LEFT
LONG = "cheese " * 600
PAIR_REQUEST = tei.PredictPairRequest(inputs=[QUERY, TEXTS[0]])


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("Rerank.Rerank", tei.RerankRequest(query=QUERY), "the list of texts is empty"),
        ("Rerank.Rerank", tei.RerankRequest(query=QUERY, texts=[LONG]), "608 tokens, and 512 are taken"),
        ("Predict.PredictPair", tei.PredictPairRequest(inputs=[QUERY, LONG]), "512 are taken"),
        (
            "Rerank.RerankStream",
            [tei.RerankStreamRequest(query=QUERY, text=text, truncate=text == LONG) for text in [LONG, "a"]],
            "must be the same",
        ),
        ("Rerank.RerankStream", [], "the list of texts is empty"),
        ("Predict.Predict", tei.PredictRequest(inputs=LONG), "512 are taken"),
        ("Predict.PredictPair", tei.PredictPairRequest(inputs=[QUERY]), "two texts, and this one 1"),
        ("Tokenize.Tokenize", tei.EncodeRequest(inputs="a", prompt_name="query"), "no prompt 'query'"),
        ("Tokenize.Decode", tei.DecodeRequest(ids=[1 << 31]), "at most 2,147,483,647"),
        ("Predict.PredictPairStream", [PAIR_REQUEST, tei.PredictPairRequest()], "two texts, and this one 0"),
    ],
)
def test_what_has_no_score_is_refused(channel: grpc.Channel, method: str, request_: Any, reason: str) -> None:
    refused = refusal(channel, method, iter(request_) if isinstance(request_, list) else request_)
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in refused.details()


@pytest.mark.parametrize("method", ["Rerank/Rerank", "Rerank/RerankStream", "Predict/PredictPairStream"])
def test_what_is_no_message_is_refused_in_a_line(
    gateway: Running, channel: grpc.Channel, method: str
) -> None:
    send: Any = channel.stream_stream(f"/tei.v1.{method}")
    with pytest.raises(grpc.RpcError) as refused:
        list(send(iter([b"\xff\xff\xff"]), timeout=60))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the bytes that were sent are not a message of this method"
    assert "Traceback" not in gateway.log.read_text()


def test_it_describes_itself(gateway: Running, channel: grpc.Channel) -> None:
    found = call(channel, "Info.Info", tei.InfoRequest())
    assert (found.model_id, found.model_type) == ("demo", tei.MODEL_TYPE_RERANKER)
    health: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("", "tei.v1.Rerank"):
        checked = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="tei.v1.RerankRequest"),
    ]
    listed, file = reflection.ServerReflectionInfo(iter(asked), timeout=60)
    names = {service.name for service in listed.list_services_response.service}
    assert {"tei.v1.Info", "tei.v1.Predict", "tei.v1.Rerank", "grpc.health.v1.Health"} <= names
    assert b"RerankRequest" in file.file_descriptor_response.file_descriptor_proto[0]


def test_keys_and_their_limits_hold_here_too(
    shared_queue: Server, gateway: Running, channel: grpc.Channel
) -> None:
    store = KeyStore(shared_queue.client)
    rerank = tei.RerankRequest(query=QUERY, texts=TEXTS)
    text, key = store.create("grpc-test", days=1, pairs_per_minute=2)
    other, _ = store.create("grpc-test-2", days=1, models=("another",))
    try:
        for method, request in (("Rerank.Rerank", rerank), ("Info.Info", tei.InfoRequest())):
            for metadata in ({}, {"authorization": "Bearer none"}):
                refused = refusal(channel, method, request, **metadata)
                assert refused.code() == grpc.StatusCode.UNAUTHENTICATED
        refused = refusal(channel, "Rerank.Rerank", rerank, x_api_key=other)
        assert refused.code() == grpc.StatusCode.PERMISSION_DENIED
        assert call(channel, "Rerank.Rerank", rerank, authorization=f"Bearer {text}").ranks
        refused = refusal(channel, "Rerank.Rerank", rerank, x_api_key=text)
        assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = {each.key: str(each.value) for each in refused.trailing_metadata() or ()}
        assert 1 <= int(trailing["retry-after"]) <= 120
        assert int(trailing["grpc-retry-pushback-ms"]) == 1000 * int(trailing["retry-after"])
        big = tei.RerankRequest(query=QUERY, texts=[*TEXTS, "more"])
        assert "send it in parts" in refusal(channel, "Rerank.Rerank", big, x_api_key=text).details()
        once, _ = store.create("grpc-test-2", days=1, pairs_per_minute=1)
        answered = call(channel, "Predict.PredictPairStream", iter([PAIR_REQUEST] * 2), x_api_key=once)
        assert next(answered).predictions
        with pytest.raises(grpc.RpcError) as ended:
            next(answered)
        assert ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        store.revoke([key.name, "grpc-test-2"])


def test_tls_with_certificates_on_both_sides(shared_queue: Server, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    environ = {
        "RANKMILL_GATEWAY_GRPC_CERT": "cert.pem",
        "RANKMILL_GATEWAY_GRPC_KEY": "key.pem",
        "RANKMILL_GATEWAY_GRPC_CLIENT_CA": "ca.pem",
    }

    def codes(running: Running, signer: trustme.CA | None) -> grpc.StatusCode:
        mine = signer and signer.issue_cert("client")
        chain = mine and (mine.private_key_pem.bytes(), mine.cert_chain_pems[0].bytes())
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *(chain or (None, None)))
        with grpc.secure_channel(grpc_address(running), credentials) as opened:
            try:
                call(opened, "Info.Info", tei.InfoRequest())
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    with running_gateway(shared_queue.url, tmp_path, *ANY_PORT, environ=environ) as running:
        assert codes(running, authority) == grpc.StatusCode.OK
        assert codes(running, stranger) == codes(running, None) == grpc.StatusCode.UNAVAILABLE


def test_a_port_that_cannot_be_is_named(gateway: Running, shared_queue: Server, tmp_path: Path) -> None:
    command = ("rankmill", "serve", "--redis", shared_queue.url, "--port", "0", "--grpc-address")
    taken = grpc_address(gateway)
    half = {"RANKMILL_GATEWAY_GRPC_CERT": str(tmp_path / "none.pem")}
    for address, environ, reason in (
        (taken, {}, f"cannot listen on {taken}"),
        ("127.0.0.1:0", half, "belong together"),
        ("0.0.0.0:0", {}, "there are no keys"),
    ):
        ended = run_command(*command, address, environ=environ)
        assert ended.code == 2, ended.err
        assert reason in ended.err.splitlines()[-1]


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    folder = ROOT / "rankmill" / "extensions" / "grpc"
    (line,) = re.findall(r"python -m (grpc_tools\.protoc .*)", (folder / "tei.proto").read_text())
    words = [word.replace("out=.", f"out={tmp_path}") for word in line.split()]
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True)
    for name in ("tei_pb2.py", "tei_pb2.pyi"):
        made = tmp_path / folder.relative_to(ROOT) / name
        assert made.read_text() == (folder / name).read_text(), f"run: python -m {line}"


_TEI_CLIENT = """
import json, sys
from tei_client import GrpcClient
client = GrpcClient(sys.argv[1])
ranked = client.rerank(json.loads(sys.argv[2]), json.loads(sys.argv[3]), raw_scores=True, return_text=True)
print(json.dumps([each.model_dump() for each in ranked.ranks]))
"""


def test_tei_client_gets_the_scores_of_http(gateway: Running) -> None:
    """In a process of its own: it has a ``tei.v1`` of its own."""
    words = [grpc_address(gateway), json.dumps(QUERY), json.dumps(TEXTS)]
    done = run_command("python", "-c", _TEI_CLIENT, *words)
    assert done.code == 0, done.err
    body = {"query": QUERY, "texts": TEXTS, "raw_scores": True, "return_text": True}
    wanted = gateway.post("/rerank", body).json
    assert json.loads(done.out) == [
        {**each, "score": pytest.approx(each["score"], abs=1e-4)} for each in wanted
    ]
