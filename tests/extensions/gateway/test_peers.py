"""What the test suites of other rerank servers ask of those, asked of the gateway below their prefixes.

The cases are restated; each names its source. Sources, all of July to November 2026:

- vLLM (vllm-project/vllm), ``tests/entrypoints/pooling/scoring/``: ``test_cross_encoder_online.py`` and
  ``test_max_tokens_per_doc.py`` at 29fda7946ff0, ``test_protocol.py`` at 5366e9ded36f
- infinity (michaelfeil/infinity at fcb951cb679d), ``libs/infinity_emb/tests/end_to_end/``:
  ``test_torch_reranker.py``, ``test_api_with_dummymodel.py``, ``test_authentication.py``
- TEI (huggingface/text-embeddings-inference at 0d124dc9773b), ``docs/openapi.json``, ``router/tests/`` and
  the test of ``core/src/tokenization.rs``

`LEFT_OUT` has the cases that a scorer of pairs does not pass, each with its reason.
"""

from __future__ import annotations

import itertools
import math
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.workers.models.sources import DEMO_MODEL
from tests.harness.gateways import Reply, Running, running_gateway
from tests.harness.processes import wait_for
from tests.harness.servers.valkey import Server

LEFT_OUT = {
    "vllm test_pooling_token_classify": "a score for each token is none of a pair",
    "vllm test_rerank_max_tokens_per_doc_validation, of 0": "no limit here, as in later releases of vLLM",
    "vllm test_gemma…, test_qwen_max_tokens_per_doc… (4)": "their models; workers' tests have these prompts",
    "infinity test_load_model": "asks no server",
    "infinity test_reranker_cant_embed_or_classify": "no embeddings: 404, not 400",
    "infinity test_embedding… (5), test_encoding_base_64": "embeddings",
    "infinity test_openapi_same_as_docs_file": "its own document",
    "tei test_rerank, the order of equal scores": "TEI has the later text first; here they keep their order",
    "tei /embed, /embed_all, /embed_sparse, /similarity, /v1/embeddings": "embeddings",
}

FRANCE = "What is the capital of France?"
QUERIES = [FRANCE, "What is the capital of Germany?"]
DOCUMENTS = ["The capital of France is Paris.", "The capital of Germany is Berlin."]
REPEATED = f"{DOCUMENTS[0]} "
PRODUCT = "This product was excellent and exceeded my expectations"
MAX_LENGTH = 100
EXACT = {"RANKMILL_PRECISION": "fp32", "RANKMILL_MAX_LENGTH": str(MAX_LENGTH)}


@pytest.fixture(scope="module")
def gateway(
    shared_queue: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    models = ["--model", "demo", "--model", str(tiny_model)]
    place = tmp_path_factory.mktemp("gateway")
    with running_gateway(shared_queue.url, place, *models, environ=EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> CrossEncoder:
    return CrossEncoder(str(DEMO_MODEL), device="cpu", max_length=MAX_LENGTH)


def answered(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return reply.json


def refused(reply: Reply) -> str:
    """The message of vLLM's error for a wrong request."""
    assert reply.status == 400, reply.body
    assert reply.json["error"]["type"] == "BadRequestError"
    return str(reply.json["error"]["message"])


def used(gateway: Running) -> tuple[int, int]:
    """Rows and tokens in the accounts."""
    entries = answered(gateway.get("/v1/usage"))["data"]
    return sum(each["pairs"] for each in entries), sum(each["tokens"] for each in entries)


# vLLM: test_cross_encoder_online.py


def test_vllm_names_the_served_model_and_has_its_tokens(gateway: Running) -> None:
    """test_basic; and ``/detokenize``, which has no case there."""
    assert answered(gateway.get("/vllm/v1/models"))["data"][0]["id"] == "demo"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = f"{PRODUCT} " * 50  # not cut, however long
    before = used(gateway)
    for special in (True, False):
        body = {"model": "demo", "prompt": text, "add_special_tokens": special, "return_token_strs": True}
        found = answered(gateway.post("/vllm/tokenize", body))
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        assert found == {
            "count": len(ids), "max_model_len": MAX_LENGTH, "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids),
        }  # fmt: skip
        back = answered(gateway.post("/vllm/detokenize", {"model": "demo", "tokens": ids}))
        assert back == {"prompt": tokenizer.decode(ids)}
    assert answered(gateway.post("/tokenize", {"prompt": ""}))["token_strs"] is None
    wait_for(lambda: used(gateway) == (before[0] + 5, before[1] + 2 * len(ids) + 4))  # in the accounts
    assert "server-timing" in gateway.post("/tokenize", {"prompt": ""}).headers


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (QUERIES[0], DOCUMENTS[0], ("queries", "documents")),
        (QUERIES[0], DOCUMENTS, ("queries", "documents")),
        (QUERIES, DOCUMENTS, ("queries", "documents")),
        (QUERIES, DOCUMENTS, ("queries", "items")),
        (QUERIES, DOCUMENTS, ("text_1", "text_2")),
        (QUERIES, DOCUMENTS, ("data_1", "data_2")),
    ],
)
def test_vllm_scores_as_transformers_does(
    gateway: Running, reference: CrossEncoder, first: Any, second: Any, names: tuple[str, str]
) -> None:
    """test_score_api_queries_str_1_documents_str_1, …_str_n, …_str_n_documents_str_n, …_vs_documents,
    …_vs_items, …_text_1_vs_text_2, …_data_1_vs_data_2.
    """
    found = answered(gateway.post("/vllm/score", {"model": "demo", names[0]: first, names[1]: second}))
    many = second if isinstance(second, list) else [second]
    asked = first if isinstance(first, list) else [first] * len(many)
    expected = reference.predict(list(zip(asked, many, strict=True))).tolist()
    assert found["id"]
    assert [each["score"] for each in found["data"]] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("top_n", [None, 2])
def test_vllm_ranks(gateway: Running, top_n: int | None) -> None:
    """test_rerank_api_texts, test_rerank_api_top_n."""
    documents = ["The capital of Brazil is Brasilia.", DOCUMENTS[0], "Cross-encoder models are neat"]
    body = {"model": "demo", "query": FRANCE, "documents": documents[: top_n and 3]}
    found = answered(gateway.post("/vllm/rerank", body | ({"top_n": top_n} if top_n else {})))
    assert found["id"]
    assert len(found["results"]) == (top_n or 3)
    assert found["results"][0]["index"] == 1
    assert found["results"][0]["relevance_score"] > found["results"][1]["relevance_score"]


@pytest.mark.parametrize(
    "path", ["/vllm/rerank", "/vllm/v1/rerank", "/vllm/v2/rerank", "/vllm/score", "/score"]
)
def test_vllm_refuses_what_is_longer_than_the_model(gateway: Running, path: str) -> None:
    """test_rerank_api_max_model_len, test_score_api_max_model_len."""
    query = {("queries" if "score" in path else "query"): FRANCE * 20}
    body = {"model": "demo", **query, "documents": DOCUMENTS}
    assert "Please reduce the length of the input prompt" in refused(gateway.post(path, body))
    more = {**body, "truncate_prompt_tokens": MAX_LENGTH + 1}
    assert "Please request a smaller truncation size." in refused(gateway.post(path, more))
    for most in (-1, MAX_LENGTH, 50):
        found = answered(gateway.post(path, {**body, "truncate_prompt_tokens": most}))
        assert found["usage"]["prompt_tokens"] == 2 * (50 if most == 50 else MAX_LENGTH)


@pytest.mark.parametrize("path", ["rerank", "score"])
def test_vllm_takes_the_same_as_invocations(gateway: Running, path: str) -> None:
    """test_invocations."""
    query = {("queries" if path == "score" else "query"): FRANCE}
    body = {"model": "demo", **query, "documents": DOCUMENTS}
    plain, invoked = (answered(gateway.post(f"/vllm/{each}", body)) for each in (path, "invocations"))
    assert plain.keys() == invoked.keys()
    name = "data" if path == "score" else "results"
    for one, other in zip(plain[name], invoked[name], strict=True):
        assert one.keys() == other.keys()
        assert [value for value in one.values() if isinstance(value, float)] == pytest.approx(
            [value for value in other.values() if isinstance(value, float)]
        )


def test_vllm_leaves_the_activation_out(gateway: Running, tiny_model: Path) -> None:
    """test_use_activation."""

    def scores(use_activation: bool | None) -> list[float]:
        body = {
            "model": tiny_model.name,
            "query": FRANCE,
            "documents": DOCUMENTS,
            "use_activation": use_activation,
        }
        return [each["relevance_score"] for each in answered(gateway.post("/vllm/rerank", body))["results"]]

    default, with_it, without = scores(None), scores(True), scores(False)
    assert default == pytest.approx(with_it)
    assert without != pytest.approx(with_it, abs=1e-2)
    assert [1 / (1 + math.exp(-score)) for score in without] == pytest.approx(with_it, abs=1e-4)


def test_vllm_pools_what_it_classifies(gateway: Running) -> None:
    """test_pooling_classify."""
    body = {"model": "demo", "input": DOCUMENTS}
    found = answered(gateway.post("/vllm/pooling", {**body, "encoding_format": "float", "task": "classify"}))
    classified = answered(gateway.post("/vllm/classify", body))
    assert [len(each["data"]) for each in found["data"]] == [1, 1]
    assert [each["data"] for each in found["data"]] == [each["probs"] for each in classified["data"]]
    coded = answered(gateway.post("/vllm/pooling", {**body, "encoding_format": "base64"}))
    vectors = [np.frombuffer(b64decode(each["data"]), "<f4") for each in coded["data"]]
    np.testing.assert_allclose(vectors, [each["data"] for each in found["data"]], rtol=1e-5)


@pytest.mark.parametrize("task", ["embed", "token_embed", "plugin", "token_classify"])
def test_vllm_refuses_other_tasks(gateway: Running, task: str) -> None:
    """test_pooling_not_supported; the last one is left out."""
    body = {"model": "demo", "input": FRANCE, "encoding_format": "float", "task": task}
    assert refused(gateway.post("/vllm/pooling", body)).startswith(f"Unsupported task: {task!r}")


@pytest.mark.parametrize("most", [5, 10, 15])
def test_vllm_cuts_each_document(gateway: Running, most: int) -> None:
    """test_rerank_max_tokens_per_doc, …_reduces_tokens, test_score_max_tokens_per_doc_with_score_template,
    and of test_max_tokens_per_doc.py test_jina_max_tokens_per_doc, …_reduces_tokens.
    """

    def tokens(count: int, **options: Any) -> int:
        body = {"model": "demo", "query": FRANCE, "documents": [REPEATED * count], **options}
        found = answered(gateway.post("/vllm/rerank", body))
        assert len(found["results"]) == 1
        return int(found["usage"]["prompt_tokens"])

    alone = tokens(0)
    assert tokens(20, max_tokens_per_doc=most) == alone + most
    assert tokens(20, truncate_prompt_tokens=MAX_LENGTH - 1) == MAX_LENGTH - 1
    assert tokens(5, max_tokens_per_doc=most) < tokens(5, max_tokens_per_doc=0)


def test_vllm_refuses_a_negative_number_of_tokens(gateway: Running) -> None:
    """test_rerank_max_tokens_per_doc_validation."""
    body = {"model": "demo", "query": FRANCE, "documents": DOCUMENTS, "max_tokens_per_doc": -5}
    assert refused(gateway.post("/vllm/rerank", body)).startswith("max_tokens_per_doc: ")


@pytest.mark.parametrize("top_n", [None, 0, 1, 2, -1])
def test_vllm_s_top_n(gateway: Running, top_n: int | None) -> None:
    """test_protocol.py: test_top_n_defaults_to_zero, test_non_negative_top_n_is_accepted,
    test_negative_top_n_is_rejected.
    """
    body = {"query": "capital of France", "documents": ["Paris", "Berlin"], "top_n": top_n}
    reply = gateway.post("/vllm/rerank", body)
    if top_n == -1:
        assert refused(reply).startswith("top_n: ")
    else:
        assert len(answered(reply)["results"]) == (top_n or 2)


# infinity

TOWERS = [
    "The Eiffel Tower is located in the United States.",
    "The Eiffel Tower is located in Paris, France",
    "The Eiffel Tower is located in the United Kingdom.",
]
WHERE = "Where is the Eiffel Tower located?"


def test_infinity_lists_its_models_with_their_load(gateway: Running, tiny_model: Path) -> None:
    """test_model_route of test_torch_reranker.py and of test_api_with_dummymodel.py."""
    data = answered(gateway.get("/infinity/models"))["data"]
    assert [each["id"] for each in data] == ["demo", tiny_model.name]
    assert isinstance(data[0]["stats"], dict)
    assert isinstance(answered(gateway.get("/infinity/health"))["unix"], float)


def test_infinity_ranks_with_the_model_s_probabilities(gateway: Running, reference: CrossEncoder) -> None:
    """test_reranker."""
    documents = ["My favorite dish is a hamburger.", *TOWERS, "I enjoiy flying to the moon."]
    found = answered(
        gateway.post("/infinity/rerank", {"model": "demo", "query": WHERE, "documents": documents})
    )
    assert {"model", "usage"} <= found.keys()
    by_place = {each["index"]: each["relevance_score"] for each in found["results"]}
    logits = reference.predict([(WHERE, text) for text in documents], activation_fn=torch.nn.Identity())
    expected = [1 / (1 + math.exp(-each)) for each in logits]
    assert dict(sorted(by_place.items())) == pytest.approx(dict(enumerate(expected)), abs=1e-4)


@pytest.mark.parametrize("return_documents", [True, False])
@pytest.mark.parametrize("top_n", [1, 2, 8000])
def test_infinity_s_top_n(gateway: Running, top_n: int, return_documents: bool) -> None:
    """test_reranker_top_n; the best is that of the model here, whatever the order of the documents."""
    best = set()
    for documents in itertools.permutations(TOWERS):
        body = {
            "model": "demo", "query": WHERE, "documents": list(documents), "top_n": top_n,
            "return_documents": return_documents,
        }  # fmt: skip
        results = answered(gateway.post("/infinity/rerank", body))["results"]
        assert len(results) == min(top_n, 3)
        best.add(documents[results[0]["index"]])
        assert (results[0].get("document") == documents[results[0]["index"]]) == return_documents
    assert len(best) == 1


@pytest.mark.parametrize("top_n", [-1, 0])
def test_infinity_refuses_a_top_n_below_one(gateway: Running, top_n: int) -> None:
    """test_reranker_invalid_top_n."""
    body = {"model": "demo", "query": WHERE, "documents": TOWERS, "top_n": top_n}
    assert gateway.post("/infinity/rerank", body).status == 422


def test_infinity_asks_for_a_key(gateway: Running, shared_queue: Server) -> None:
    """test_authentication."""
    store = KeyStore(shared_queue.client)
    text, _ = store.create("peers", days=1)
    try:
        for headers, status in (({}, 401), ({"authorization": f"Bearer {text}"}, 200)):
            assert gateway.get("/infinity/models", **headers).status == status
            body = {"query": WHERE, "documents": TOWERS}
            assert gateway.post("/infinity/rerank", body, **headers).status == status
    finally:
        store.revoke(["peers"])


# TEI: the schemas of its document

TEXT, WHOLE, NUMBER, YES = str, int, float, bool
NULL = type(None)
INFO: Mapping[str, tuple[type, ...]] = {
    "model_id": (TEXT,), "model_sha": (TEXT, NULL), "served_model_name": (TEXT,), "model_dtype": (TEXT,),
    "model_type": (dict,), "max_concurrent_requests": (WHOLE,), "max_input_length": (WHOLE,),
    "max_batch_tokens": (WHOLE,), "max_batch_requests": (WHOLE, NULL), "max_client_batch_size": (WHOLE,),
    "auto_truncate": (YES,), "tokenization_workers": (WHOLE,), "version": (TEXT,), "sha": (TEXT, NULL),
    "docker_label": (TEXT, NULL),
}  # fmt: skip


def test_tei_s_info(gateway: Running) -> None:
    """Info, ModelType, ClassifierModel."""
    found = answered(gateway.get("/tei/info"))
    assert {name: type(found[name]) in kinds for name, kinds in INFO.items()} == dict.fromkeys(INFO, True)
    model = found["model_type"]["reranker"]
    assert {type(each) for each in model["id2label"].values()} == {str}
    assert model["label2id"] == {label: int(number) for number, label in model["id2label"].items()}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("return_text", [False, True])
@pytest.mark.parametrize("truncate", [None, False, True])
@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_tei_s_rerank(
    gateway: Running, raw: bool, return_text: bool, truncate: bool | None, direction: str
) -> None:
    """RerankRequest, TruncationDirection, RerankResponse, Rank."""
    body = {
        "query": FRANCE, "texts": DOCUMENTS, "raw_scores": raw, "return_text": return_text,
        "truncate": truncate, "truncation_direction": direction,
    }  # fmt: skip
    found = answered(gateway.post("/tei/rerank", body))
    assert sorted(each["index"] for each in found) == [0, 1]
    assert {type(each["score"]) for each in found} == {float}
    assert found[0]["score"] >= found[1]["score"]
    for each in found:
        assert each.get("text") == (DOCUMENTS[each["index"]] if return_text else None)


def test_tei_gives_equal_texts_equal_scores(gateway: Running) -> None:
    """test_http_rerank.rs: test_rerank."""
    found = answered(gateway.post("/tei/rerank", {"query": "test", "texts": ["test", "other", "test"]}))
    by_place = {each["index"]: each["score"] for each in found}
    assert by_place[0] == pytest.approx(by_place[2], rel=1e-6)


def test_tei_s_predict(gateway: Running) -> None:
    """PredictRequest, PredictInput (texts and pairs, one or a batch), PredictResponse, Prediction."""
    one = answered(gateway.post("/tei/predict", {"inputs": [FRANCE, DOCUMENTS[0]]}))
    several = answered(gateway.post("/tei/predict", {"inputs": [[FRANCE, text] for text in DOCUMENTS]}))
    alone = answered(gateway.post("/tei/predict", {"inputs": FRANCE}))
    texts = answered(gateway.post("/tei/predict", {"inputs": [[text] for text in DOCUMENTS]}))
    assert len(several) == len(texts) == len(DOCUMENTS)
    for predictions in (one, *several, alone, *texts):
        assert [{name: type(each) for name, each in found.items()} for found in predictions] == [
            {"score": float, "label": str}
        ]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", [FRANCE, "这是一个文本向量化的测试句子, déjà vu"])
def test_tei_s_tokenize_and_decode(gateway: Running, text: str, special: bool) -> None:
    """TokenizeRequest, TokenizeInput, SimpleToken, DecodeRequest, InputIds, DecodeResponse, and the test
    ``tokenizer``: each token has the bytes of the text that it stands for.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    body = {"inputs": [text, FRANCE], "add_special_tokens": special}
    tokens, other = answered(gateway.post("/tei/tokenize", body))
    assert [other] == answered(gateway.post("/tokenize", {**body, "inputs": FRANCE}))
    ids = [each["id"] for each in tokens]
    assert ids == tokenizer(text, add_special_tokens=special)["input_ids"]
    added = [each for each in tokens if each["special"]]
    nowhere = {"special": True, "start": None, "stop": None}
    assert [each | nowhere for each in added] == added
    assert [each["text"] for each in added] == (["[CLS]", "[SEP]"] if special else [])
    raw = text.encode()
    own = [each for each in tokens if not each["special"]]
    assert [raw[each["start"] : each["stop"]].decode() for each in own] == [each["text"] for each in own]
    assert "".join(each["text"] for each in own) == text.replace(" ", "")
    for skip in (True, False):
        decoded = tokenizer.decode(ids, skip_special_tokens=skip)
        body = {"ids": ids, "skip_special_tokens": skip}
        assert answered(gateway.post("/tei/decode", body)) == [decoded]
        assert answered(gateway.post("/decode", {**body, "ids": [ids, ids]})) == [decoded, decoded]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/tei/tokenize", {"inputs": []}, 400, "Empty"),
        ("/tei/tokenize", {"inputs": "a", "prompt_name": "query"}, 422, "Validation"),
        ("/tei/decode", {"ids": [-1]}, 422, "Validation"),
        ("/tokenize", {"inputs": ["a" * 200_000] * 2}, 413, "Validation"),
        ("/tei/rerank", {"query": "q", "texts": []}, 400, "Empty"),
        ("/tei/rerank", {"query": "q"}, 422, "Validation"),
        ("/tei/rerank", {"query": FRANCE * 20, "texts": ["a"], "truncate": False}, 422, "Validation"),
        ("/tei/predict", {"inputs": [FRANCE * 20, "a"], "truncate": False}, 422, "Validation"),
        ("/tei/predict", {"inputs": []}, 400, "Empty"),
    ],
)
def test_tei_s_errors(gateway: Running, path: str, body: dict[str, Any], status: int, kind: str) -> None:
    """ErrorResponse, ErrorType, with the statuses of ``router/src/http/server.rs``."""
    reply = gateway.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (status, kind)
    assert isinstance(reply.json["error"], str)


def test_tei_truncates_where_the_body_does_not_say(gateway: Running) -> None:
    """``auto_truncate``, which is on."""
    for truncate in (None, True):
        body = {"query": FRANCE * 20, "texts": DOCUMENTS, "truncate": truncate}
        assert len(answered(gateway.post("/tei/rerank", body))) == 2


@pytest.mark.parametrize("path", ["/tei/embed", "/tei/v1/embeddings", "/infinity/embeddings"])
def test_paths_that_the_gateway_leaves_out_are_not_found(gateway: Running, path: str) -> None:
    reply = gateway.post(path, {"model": "demo", "input": FRANCE, "inputs": FRANCE})
    assert reply.status == 404
    assert "error" in reply.json
