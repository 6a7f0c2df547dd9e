"""Texts by the labels of a classifier: a real gateway, a real worker, a model with three outputs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rankmill import Client
from tests.conftest import ENVIRON, QUICK_LEASE
from tests.extensions.batches.test_batches import ended, upload
from tests.harness.gateways import Running, running_gateway
from tests.harness.models.rerankers import PAIR_TEMPLATE, make_decoder
from tests.harness.models.tiny import make_bert
from tests.harness.preloaded import PreloadedProcess
from tests.harness.servers.valkey import Server

TEXTS = ["the moon", "big cat", "tea and bread"]
NAMES = ["LABEL_0", "LABEL_1", "LABEL_2"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the moon"}]
PARTS = [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "the moon"}]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("labels"), labels=3)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model: one output, and a chat template."""
    place = tmp_path_factory.mktemp("chat") / "reward"
    return make_decoder(place, "qwen2", task="classifier", template=TEMPLATE)


@torch.inference_mode()
def reward(chat: Path, messages: list[dict[str, str]]) -> tuple[float, int]:
    """transformers' own of a conversation, and its tokens."""
    network = AutoModelForSequenceClassification.from_pretrained(chat, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(chat)
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    return float(network(ids).logits[0, 0]), ids.shape[1]


@pytest.fixture(scope="module")
def logits(model: Path) -> torch.Tensor:
    """transformers' own, of each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.cat([network(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])


@pytest.fixture(scope="module")
def gateway(
    shared_queue: Server, model: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A gateway that ranks by one label, with files and a runner; it has a reward model too."""
    place = tmp_path_factory.mktemp("gateway")
    (place / "files").mkdir()
    files = {"RANKMILL_GATEWAY_FILES": str(place / "files"), "RANKMILL_LABEL": "1"}
    environ = {**files, "RANKMILL_PRECISION": "fp32"}
    log = place / "runner.log"
    own = {**ENVIRON, **QUICK_LEASE, "RANKMILL_METRICS_ADDRESS": "none"}
    with log.open("wb") as out:
        command = ["rankmill", "runner", "--redis", shared_queue.url, "--read", f".,{model},{chat}"]
        runner: Any = PreloadedProcess(command, cwd=place, stdout=out, stderr=out, env=own)
    causal = make_decoder(place / "causal", "qwen2", task="causal", template=PAIR_TEMPLATE)
    named = {"reward": chat, "causal": causal, "gone": place / "none"}
    models = ["--model", str(model), *(f"--model={name}={path}" for name, path in named.items())]
    with running_gateway(shared_queue.url, place, *models, environ=environ) as running:
        yield running
    runner.terminate()
    assert runner.wait(timeout=60) == 0


def by_label(row: torch.Tensor) -> list[dict[str, Any]]:
    order = sorted(range(3), key=lambda at: -float(row[at]))
    return [{"score": pytest.approx(float(row[at]), abs=1e-5), "label": NAMES[at]} for at in order]


def test_tei_s_predict_has_all_labels_of_a_text(gateway: Running, logits: torch.Tensor) -> None:
    chances = logits.softmax(1)
    one = gateway.post("/tei/predict", {"inputs": TEXTS[0]})
    assert one.json == by_label(chances[0]), one.body
    batch = {"inputs": [[text] for text in TEXTS]}
    assert gateway.post("/predict", batch).json == [by_label(row) for row in chances]
    assert gateway.post("/predict", {**batch, "raw_scores": True}).json == [by_label(row) for row in logits]
    pair = gateway.post("/predict", {"inputs": [TEXTS[0], TEXTS[1]]}).json
    assert sorted(each["label"] for each in pair) == NAMES
    ranked = gateway.post("/rerank", {"query": TEXTS[0], "texts": TEXTS[1:]}).json  # by the setting's label
    assert {each["index"] for each in ranked} == {0, 1}


def test_vllm_s_classify_has_the_probabilities(gateway: Running, logits: torch.Tensor) -> None:
    chances = logits.softmax(1)
    found = gateway.post("/vllm/classify", {"input": TEXTS}).json
    np.testing.assert_allclose([each["probs"] for each in found["data"]], chances, atol=1e-5)
    assert [each["label"] for each in found["data"]] == [NAMES[int(row.argmax())] for row in chances]
    assert found["usage"]["total_tokens"] > 6
    events = gateway.post("/vllm/classify", {"input": TEXTS, "stream": True}).body.decode()
    scores = json.loads(events.partition("event: scores\ndata: ")[2].partition("\n")[0])
    np.testing.assert_allclose(scores["scores"], chances, atol=1e-5)


def test_vllm_s_classify_takes_a_conversation(gateway: Running, chat: Path) -> None:
    """vLLM's test_chat_request, test_invocations_chat_request (``tests/entrypoints/pooling/classify/``)."""
    score, tokens = reward(chat, CHAT)
    body = {"model": "reward", "messages": CHAT, "use_activation": False}
    found = gateway.post("/vllm/classify", body).json
    assert found["data"] == [
        {"index": 0, "label": "LABEL_0", "probs": [pytest.approx(score, abs=1e-5)], "num_classes": 1}
    ]
    assert found["usage"]["prompt_tokens"] == tokens
    chances = [pytest.approx(1 / (1 + np.exp(-score)), abs=1e-5)]
    for path, key in (("/classify", "probs"), ("/vllm/invocations", "probs"), ("/vllm/pooling", "data")):
        plain = gateway.post(path, {"model": "reward", "messages": PARTS})
        assert plain.json["data"][0][key] == chances, plain.body


@pytest.mark.parametrize(
    ("more", "status", "reason"),
    [
        ({"input": "a"}, 400, "give either input or messages"),
        ({"messages": None}, 400, "give either input or messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "a"}]}, 400, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a content is text"),
        ({"messages": [{"role": "user", "content": [{"type": "x", "text": "y"}]}]}, 400, "a content is text"),
        ({"add_generation_prompt": True}, 400, "add_generation_prompt: "),
        ({"add_special_tokens": True}, 400, "add_special_tokens: "),
        ({"truncation_side": "left"}, 400, "leave out truncation_side"),
        ({"model": None}, 400, "has no chat template"),
        ({"messages": [CHAT[0]] * 90}, 400, "tokens"),
    ],
)
def test_what_is_no_conversation_is_one_line(
    gateway: Running, more: dict[str, Any], status: int, reason: str
) -> None:
    reply = gateway.post("/vllm/classify", {"model": "reward", "messages": CHAT, **more})
    assert (reply.status, reason in reply.json["error"]["message"]) == (status, True), reply.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/vllm/classify", {"messages": CHAT}),
        ("/vllm/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 8}),
        ("/vllm/rerank", {"query": "a", "documents": ["b"], "instruction": "find", "stream": True}),
    ],
)
def test_what_workers_lack_is_not_the_caller_s_fault(
    gateway: Running, path: str, body: dict[str, Any]
) -> None:
    """A client asks again later, or elsewhere, at 502; at 400 it never would."""
    reply = gateway.post(path, {"model": "gone", **body})
    text = reply.body.decode()
    assert "the workers cannot score it with this model" in text, text
    assert "no such directory" in gateway.log.read_text()
    assert "do not fit the model" not in text
    error = json.loads(text.partition("data: ")[2] if "stream" in body else text)["error"]
    assert (error["code"], error["param"]) == (502, None), text


def test_an_option_that_does_not_fit_the_model_is_named(gateway: Running, model: Path) -> None:
    body = {"model": model.name, "query": "a", "documents": ["b"], "truncate_prompt_tokens": 100_000}
    error = gateway.post("/vllm/rerank", body).json["error"]
    assert (error["code"], error["param"]) == (400, "truncate_prompt_tokens")
    assert "max_length 100000 is more than the" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/tei/predict", {"inputs": [1]}, 422, "inputs"),
        ("/tei/predict", {"inputs": None}, 422, "inputs"),
        ("/tei/predict", {"inputs": [["a"], ["b", "c"]]}, 422, "single texts and pairs go into two requests"),
        ("/tei/predict", {"inputs": "moon " * 600, "truncate": False}, 422, "tokens"),
        ("/vllm/classify", {"input": []}, 400, "the list of texts is empty"),
        ("/vllm/classify", {"input": [["a"]]}, 400, "input"),
        ("/vllm/classify", {"input": "moon " * 600}, 400, "tokens"),
        ("/vllm/classify", {"input": ["a"], "model": "none"}, 404, "no model"),
        ("/vllm/classify", {"input": ["a"], "model": "causal"}, 400, "model causal is not a sequence class"),
    ],
)
def test_what_cannot_be_classified_is_one_line(
    gateway: Running, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    reply = gateway.post(path, body)
    assert (reply.status, reason in reply.body.decode()) == (status, True), reply.body
    assert "Traceback" not in gateway.log.read_text()


def test_a_batch_of_texts(gateway: Running, logits: torch.Tensor) -> None:
    lines = [
        {"custom_id": text, "method": "POST", "url": "/predict", "body": {"inputs": text}} for text in TEXTS
    ]
    lines += [{"custom_id": "x", "method": "POST", "url": "/predict", "body": {"inputs": ["a", "b", "c"]}}]
    file = upload(gateway, "in.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()).json
    made = gateway.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/predict"})
    batch = ended(gateway, made.json["id"])
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1), batch["errors"]
    content = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body.decode()
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, content.splitlines())}
    assert found == dict(zip(TEXTS, map(by_label, logits.softmax(1)), strict=True))


def test_a_batch_of_conversations(gateway: Running, chat: Path) -> None:
    body: dict[str, Any] = {"model": "reward", "messages": CHAT, "use_activation": False}
    other = {**body, "messages": [*CHAT, CHAT[0]]}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/vllm/classify", "body": each}
        for number, each in enumerate([body, other])
    ]
    file = upload(gateway, "in.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()).json
    made = gateway.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/vllm/classify"})
    batch = ended(gateway, made.json["id"])
    assert batch["status"] == "completed", batch["errors"]
    content = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body.decode()
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, content.splitlines())}
    for number, each in enumerate([body, other]):
        score, tokens = reward(chat, each["messages"])
        assert found[str(number)]["data"][0]["probs"] == [pytest.approx(score, abs=1e-5)]
        assert found[str(number)]["usage"]["prompt_tokens"] == tokens


def test_tokens_of_a_reward_model_that_is_not_loaded(gateway: Running, chat: Path) -> None:
    """Its files name no prompt for pairs, and it has no output of the name in the gateway's settings."""
    gateway.post("/v1/cache/clear", {})
    reply = gateway.post("/vllm/tokenize", {"model": "reward", "prompt": "the moon"})
    tokenizer = AutoTokenizer.from_pretrained(chat)
    assert (reply.status, reply.json.get("tokens")) == (200, tokenizer("the moon")["input_ids"]), reply.body


def test_tokens_have_no_batch(gateway: Running) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/tokenize", "body": {"inputs": "a"}}
    file = upload(gateway, "in.jsonl", json.dumps(line).encode()).json
    made = gateway.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/tokenize"})
    assert (made.status, "endpoint" in made.body.decode()) == (400, True), made.body


def test_a_file_of_texts(gateway: Running, model: Path, logits: torch.Tensor) -> None:
    written = io.BytesIO()
    pq.write_table(pa.table({"t": TEXTS}), written)
    file = upload(gateway, "texts.parquet", written.getvalue()).json
    made = gateway.post("/v1/batches", {"input_file_id": file["id"], "pairs": {"text_column": "t"}})
    batch = ended(gateway, made.json["id"])
    assert batch["status"] == "completed", batch["errors"]
    scored = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body
    table = pq.read_table(io.BytesIO(scored))
    assert table.column_names == ["t", "score"]
    np.testing.assert_allclose(table["score"].to_pylist(), logits[:, 1], atol=1e-5)  # the setting's label


def test_a_client_classifies(
    shared_queue: Server, model: Path, tiny_model: Path, logits: torch.Tensor
) -> None:
    with Client(shared_queue.url, model=str(model), precision="fp32") as client:
        *found, missing = client.classify([*TEXTS, None], timeout=60)
        for each, row in zip(found, logits.softmax(1), strict=True):
            assert (each.label, list(each.probabilities)) == (NAMES[int(row.argmax())], NAMES)
            np.testing.assert_allclose(list(each.probabilities.values()), row, atol=1e-5)
        assert (missing.label, missing.probabilities, missing.error) == ("", {}, "text is null")
        apart = client.classify(TEXTS, timeout=60, activation="sigmoid")
        values = [list(each.probabilities.values()) for each in apart]
        np.testing.assert_allclose(values, logits.sigmoid(), atol=1e-5)
        (alone,) = client.classify(TEXTS[:1], timeout=60, model=str(tiny_model))
        assert 0 < alone.probabilities["LABEL_0"] < 1
        assert client.classify([], timeout=60) == []
