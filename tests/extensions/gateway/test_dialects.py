"""Dialects as pure translations: what each body asks for, and what is made of its scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rankmill.extensions.gateway.bodies import parse
from rankmill.extensions.gateway.dialects.base import Body, ScorePath, read_as
from rankmill.extensions.gateway.dialects.routes import certain, dialects, score_paths
from rankmill.extensions.gateway.dialects.tei import TEI, known_info, simple_tokens
from rankmill.extensions.gateway.dialects.vllm import VLLM, VllmRerank
from rankmill.extensions.gateway.refusals import KINDS, Refusal, unscorable
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest, within
from rankmill.jobs.contract.encodings import TokensFound
from rankmill.jobs.contract.errors import too_long
from rankmill.jobs.runtime.settings import load_settings, run_spec

TEXTS = ["a", "b", "c"]
SCORED = RequestScores([0.25, 0.75, 0.5], "m", tokens=30, id="r1", created=1700000000)
RANKED = [(1, 0.75), (2, 0.5), (0, 0.25)]


PATHS = score_paths()


def path_of(path: str, owner: str | None = None) -> ScorePath:
    (found,) = [each for each in score_paths(owner) if each.path == path]
    return found


def kind_of(path: str, body: dict[str, Any]) -> type[Body]:
    return path_of(path).body(body)


def asked(path: str, owner: str | None = None, /, **body: Any) -> ScoreRequest:
    """What a body asks for at a path."""
    found = path_of(path, owner)
    return found.score_request(read_as(found.body(body), body), body)


def read(path: str, **body: Any) -> Body:
    return read_as(kind_of(path, body), body)


def answer(path: str, **body: Any) -> Any:
    return read(path, **body).answer(SCORED)


def test_tei_ranks_with_the_sigmoid_unless_raw_scores_are_wanted() -> None:
    body = {"query": "q", "texts": TEXTS}
    for path in ("/rerank", "/tei/rerank"):
        assert asked(path, **body) == ScoreRequest("q", TEXTS, spec={"activation": "sigmoid"})
        assert answer(path, **body) == [{"index": place, "score": score} for place, score in RANKED]
    assert asked("/rerank", **body, raw_scores=True).spec == {"activation": "identity"}
    assert answer("/rerank", **body, return_text=True)[0] == {"index": 1, "score": 0.75, "text": "b"}
    for side in ("Left", "left", "Right", "right"):
        assert asked("/rerank", **body, truncation_direction=side).spec["truncation_side"] == side.lower()


def test_tei_predicts_pairs() -> None:
    one = read("/predict", inputs=["a", "b"])
    assert one.score_request(VLLM).rows() == [("a", "b")]
    assert one.answer(SCORED) == [{"score": 0.25, "label": "LABEL_0"}]
    several = read("/predict", inputs=[["a", "b"], ["c", "d"], ["e", "f"]])
    assert several.score_request(VLLM).rows() == [("a", "b"), ("c", "d"), ("e", "f")]
    assert several.answer(SCORED) == [[{"score": score, "label": "LABEL_0"}] for score in SCORED.scores]
    assert asked("/predict", inputs=["a", "b"]).spec == {
        "activation": "probability", "all_labels": True, "label": None,
    }  # fmt: skip
    assert asked("/predict", inputs=["a", "b"], raw_scores=True).spec["activation"] == "identity"


LABELLED = RequestScores([[0.25, 0.75], [0.75, 0.25]], "m", tokens=30, id="r1", labels=("bad", "good"))


def test_tei_predicts_single_texts_by_all_labels() -> None:
    for single in ("a", ["a"]):
        found = asked("/predict", inputs=single)
        assert (found.rows(), found.spec["inputs"]) == ([("a",)], "texts")
        assert answer("/predict", inputs=single) == [{"score": 0.25, "label": "LABEL_0"}]
    assert asked("/predict", inputs=[["a"], ["b"]], truncate=False).spec["long"] == "refuse"
    assert asked("/predict", inputs=[["a"], ["b"]]).rows() == [("a",), ("b",)]
    shown = read("/predict", inputs=[["a"], ["b"]]).answer(LABELLED)
    assert shown == [
        [{"score": 0.75, "label": "good"}, {"score": 0.25, "label": "bad"}],
        [{"score": 0.75, "label": "bad"}, {"score": 0.25, "label": "good"}],
    ]
    for wrong, reason in (
        ([["a"], ["b", "c"]], "go into two requests"),
        (["a", "b", "c"], "one text, or a pair"),
        ([[]], "one text, or a pair"),
    ):
        with pytest.raises(Refusal, match=f"^inputs: .*{reason}"):
            asked("/predict", inputs=wrong)


def test_vllm_classifies_texts() -> None:
    for path in ("/classify", "/vllm/classify", "/invocations", "/vllm/invocations"):
        found = asked(path, input=["a", "b"], model="m")
        assert (found.rows(), found.model, found.spec["activation"]) == ([("a",), ("b",)], "m", "probability")
    assert asked("/classify", input="a", use_activation=False).spec["activation"] == "identity"
    shown: Any = read("/classify", input=["a", "b"]).answer(LABELLED)
    assert shown["data"] == [
        {"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2},
        {"index": 1, "label": "bad", "probs": [0.75, 0.25], "num_classes": 2},
    ]
    assert (shown["object"], shown["usage"]["total_tokens"]) == ("list", 30)


def test_settings_for_pairs_and_windows_leave_out_what_does_not_fit_them() -> None:
    texts, pairs = asked("/predict", inputs="a"), asked("/predict", inputs=["a", "b"])
    plain = load_settings({})
    for long, kept in (("truncate", True), ("split-mean", True), ("split", False)):
        settings = plain.model_copy(
            update={"long": long, "instruction": "find", "label": "1" if kept else None}
        )
        spec = within(settings, "m", texts.spec)
        assert (spec["inputs"], spec["instruction"], "all_labels" in spec) == ("texts", None, kept)
        run_spec(settings, spec)  # it is valid
        assert within(settings, "m", pairs.spec)["inputs"] == "pairs"
        refused = within(settings, "m", {"long": "refuse"})
        assert ("long" in refused) == (long == "truncate")
    one = plain.model_copy(update={"long": "split", "label": "1"})
    for all_labels in (texts, pairs):  # the score of label 1 would be called LABEL_0
        with pytest.raises(Refusal, match="scores only the label '1'"):
            within(one, "m", all_labels.spec)


def test_tei_s_info_holds_what_its_clients_can_hold() -> None:
    settings = load_settings({"precision": "auto"})
    about = TokensFound(text="", ids=(), words=(), special=(), spans=(), most=1 << 24)
    info = known_info(settings, "m", about, {"precision": "bf16"}, workers=0)
    assert (info["model_dtype"], info["tokenization_workers"]) == ("bfloat16", 1)
    assert info["max_input_length"] == 1 << 24
    assert info["max_batch_tokens"] == (1 << 31) - 1
    assert known_info(settings, "m", about, {}, 1)["model_dtype"] == "float32"


def test_cohere_v2() -> None:
    body = {"model": "m", "query": "q", "documents": TEXTS}
    assert asked("/v2/rerank", **body) == ScoreRequest("q", TEXTS, "m", {"activation": "sigmoid"})
    limited = asked("/v2/rerank", **body, max_tokens_per_doc=4096)
    assert limited.spec == {"activation": "sigmoid", "max_passage_tokens": 4096}
    assert asked("/v2/rerank", **body | {"documents": [{"text": "a"}, "b"]}).passages == ["a", "b"]
    assert answer("/v2/rerank", **body, top_n=2, return_documents=True) == {
        "id": "r1",
        "results": [{"index": 1, "relevance_score": 0.75}, {"index": 2, "relevance_score": 0.5}],
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": 30},
        },
    }


def test_cohere_v1_takes_objects_and_their_fields() -> None:
    body = {"query": "q", "documents": ["a", {"text": "b", "title": "t"}, {"text": "c"}]}
    found = read("/cohere/v1/rerank", **body, return_documents=True)
    assert found.score_request(VLLM).passages == TEXTS
    shown: Any = found.answer(SCORED)
    assert [each["document"] for each in shown["results"]] == [
        {"text": "b", "title": "t"}, {"text": "c"}, {"text": "a"}
    ]  # fmt: skip
    plain: Any = answer("/cohere/v1/rerank", **body)
    assert plain["results"][0] == {"index": 1, "relevance_score": 0.75}
    fields = {
        "query": "q",
        "documents": [{"title": "t", "text": "b", "year": 1969}],
        "rank_fields": ["title", "year"],
    }
    assert asked("/v1/rerank", **fields).passages == ["t\n1969"]
    with pytest.raises(Refusal, match=r"documents\.0: has none of the fields text"):
        asked("/cohere/v1/rerank", query="q", documents=[{"title": "t"}])


def test_jina_returns_documents_unless_told_not_to() -> None:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"]}
    found: Any = answer("/jina/v1/rerank", **body, top_n=1)
    assert found == {
        "model": "m",
        "object": "list",
        "usage": {"total_tokens": 30},
        "results": [{"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}],
    }
    assert "document" not in answer("/jina/v1/rerank", **body, return_documents=False)["results"][0]


@pytest.mark.parametrize(
    ("one", "many"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
def test_vllm_scores_one_to_many_and_many_to_many(one: str, many: str) -> None:
    for path in ("/score", "/v1/score", "/vllm/score"):
        single = read(path, **{one: "q", many: TEXTS, "model": "m"})
        assert single.score_request(VLLM).rows() == [("q", text) for text in TEXTS]
        both = read(path, **{one: ["x", "y", "z"], many: TEXTS})
        assert both.score_request(VLLM).rows() == [("x", "a"), ("y", "b"), ("z", "c")]
        assert asked(path, **{one: "q", many: "a"}).rows() == [("q", "a")]
    shown: Any = answer("/score", **{one: "q", many: TEXTS})
    assert shown == {
        "id": "score-r1",
        "object": "list",
        "created": 1700000000,
        "model": "m",
        "data": [
            {"index": place, "object": "score", "score": score} for place, score in enumerate(SCORED.scores)
        ],
        "usage": {"prompt_tokens": 30, "total_tokens": 30},
    }
    with pytest.raises(Refusal, match="has 2 texts, and the second 3: give 1 text first, or two lists"):
        asked("/score", **{one: ["x", "y"], many: TEXTS})
    assert asked("/score", **{one: "x", many: []}).rows() == []  # which is refused as nothing to score
    with pytest.raises(Refusal, match="the texts to score are missing"):
        asked("/score", **{one: "q"})


def test_vllm_options_are_fields_of_the_spec() -> None:
    body = {"query": "q", "documents": TEXTS}
    given: dict[str, Any] = {
        "use_activation": False, "truncate_prompt_tokens": 128, "instruction": "Find.", "user": "u"
    }  # fmt: skip
    expected = {"activation": "identity", "long": "truncate", "max_length": 128, "instruction": "Find."}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/vllm/v1/rerank"):
        assert asked(path, **body, **given).spec == expected
    assert asked("/vllm/rerank", **body, truncate_prompt_tokens=-1).spec == {"long": "truncate"}
    more = {
        "max_tokens_per_doc": 9,
        "truncation_side": "left",
        "chat_template_kwargs": {"instruction": "Seek."},
    }
    spec = {"long": "refuse", "max_passage_tokens": 9, "truncation_side": "left", "instruction": "Seek."}
    assert asked("/vllm/rerank", **body, **more, instruction="Find.").spec == spec
    for wrong in (
        {"max_tokens_per_doc": -1}, {"max_tokens_per_query": 5}, {"truncation_side": "middle"},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):  # fmt: skip
        with pytest.raises(Refusal, match=next(iter(wrong))):
            asked("/vllm/rerank", **body, **wrong)
    assert asked("/vllm/rerank", query="q", documents="a").rows() == [("q", "a")]
    with pytest.raises(Refusal, match="at least 4 tokens"):
        asked("/vllm/rerank", **body, truncate_prompt_tokens=2)
    shown: Any = answer("/vllm/rerank", **body, top_n=0, request_id="mine")
    assert shown["id"] == "rerank-mine"
    assert shown["results"][0] == {"index": 1, "document": {"text": "b"}, "relevance_score": 0.75}
    for path in ("/vllm/rerank", "/rerank", "/v1/rerank", "/v2/rerank"):  # only vLLM takes 0, its default
        assert len(answer(path, query="q", documents=TEXTS, top_n=0)["results"]) == 3


def test_infinity() -> None:
    body = {"query": "q", "documents": TEXTS, "return_documents": True, "model": "default/not-specified"}
    for path in ("/rerank", "/infinity/rerank"):
        assert asked(path, **body) == ScoreRequest("q", TEXTS, None, {"activation": "sigmoid"})
    shown: Any = answer("/rerank", **body)
    assert (shown["object"], shown["id"], shown["created"]) == ("rerank", "infinity-r1", 1700000000)
    assert shown["results"][0] == {"index": 1, "relevance_score": 0.75, "document": "b"}
    assert asked("/infinity/rerank", query="q", documents=["a"], raw_scores=True).spec == {
        "activation": "identity"
    }


def test_voyage() -> None:
    body = {"query": "q", "documents": TEXTS, "model": "m"}
    for path, extra in (("/v1/rerank", {"top_k": None, "truncation": True}), ("/voyage/v1/rerank", {})):
        shown: Any = answer(path, **body, **extra, return_documents=True)
        assert shown["object"] == "list"
        assert shown["data"][0] == {"index": 1, "relevance_score": 0.75, "document": "b"}
        assert shown["usage"] == {"total_tokens": 30}
    assert len(answer("/v1/rerank", **body, top_k=2)["data"]) == 2


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "tei": ("/tei/rerank", {"texts": TEXTS}),
    "tei, pairs": ("/tei/predict", {"inputs": [["a", "b"]]}),
    "voyage": ("/voyage/v1/rerank", {"documents": TEXTS}),
    "cohere": ("/cohere/v2/rerank", {"documents": TEXTS}),
    "cohere, 1": ("/cohere/v1/rerank", {"documents": TEXTS}),
    "jina": ("/jina/v1/rerank", {"documents": TEXTS}),
    "infinity": ("/infinity/rerank", {"documents": TEXTS}),
    "vllm": ("/vllm/rerank", {"documents": TEXTS}),
    "vllm, scores": ("/vllm/score", {"queries": "q", "documents": TEXTS}),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"truncate": False},
    {"truncation": False},
    {"truncate_prompt_tokens": -1},
]


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_is_cut_or_refused_as_each_service_does(name: str) -> None:
    path, body = LONG[name]
    refused = [
        asked(path, query="q", **body, **option).spec.get("long", "truncate") == "refuse"
        for option in OPTIONS
    ]
    service = name.partition(",")[0]
    assert refused == [
        service == "vllm", service in ("tei", "vllm"), service in ("voyage", "vllm"), False
    ]  # fmt: skip


def test_who_owns_a_path_says_what_becomes_of_what_is_too_long() -> None:
    body = {"query": "q", "documents": TEXTS, "user": "u"}
    assert read_as(VllmRerank, body).score_request(TEI).spec.get("long") is None
    assert asked("/v1/rerank", **body).spec.get("long") is None
    assert asked("/v1/rerank", "vllm", **body).spec["long"] == "refuse"


def test_an_answer_without_a_certain_dialect_suits_cohere_jina_and_vllm() -> None:
    shown: Any = answer("/v1/rerank", model="m", query="q", documents=TEXTS, top_n=1)
    assert shown["id"] == "r1"
    assert shown["meta"]["api_version"] == {"version": "1"}
    assert shown["object"] == "list"
    assert shown["usage"] == {"total_tokens": 30, "prompt_tokens": 30}
    assert shown["results"] == [{"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}]


@pytest.mark.parametrize("path", [each.path for each in PATHS if each.choose])
def test_a_field_that_is_null_chooses_no_dialect(path: str) -> None:
    names = {name for body in path_of(path).bodies for name in body.model_fields}
    for body in ({"query": "q", "documents": TEXTS}, {"query": "q", "texts": TEXTS}, {"prompt": "q"}):
        assert kind_of(path, dict.fromkeys(names) | body) is kind_of(path, body)


WRONG: dict[str, dict[str, Any]] = {
    "/rerank": {"query": "q", "texts": [1] * 9},
    "/v1/rerank": {"query": "q", "documents": [1] * 9},
    "/cohere/v1/rerank": {"query": "q", "documents": [1] * 9},
    "/v2/rerank": {"query": "q", "documents": [{"text": 1}] * 9},
    "/infinity/rerank": {"query": "q", "documents": [1] * 9},
    "/voyage/v1/rerank": {"query": "q", "documents": [1] * 9},
    "/vllm/rerank": {"query": "q", "documents": [1] * 9},
    "/score": {"queries": [1] * 9, "documents": [1] * 9},
    "/predict": {"inputs": [[1] * 9] * 9},
    "/tei/tokenize": {"inputs": [1] * 9},
    "/decode": {"ids": [["a"] * 9] * 9},
    "/classify": {"input": [1] * 9, "messages": [1] * 9},
    "/detokenize": {"tokens": ["a"] * 9},
}


@pytest.mark.parametrize("path", WRONG)
def test_a_list_is_read_up_to_its_first_wrong_item(path: str) -> None:
    """Millions of them would take minutes, in which the gateway answers nobody, and all memory."""
    body = WRONG[path]
    with pytest.raises(ValidationError) as refused:
        kind_of(path, body).model_validate(body)
    assert {place for error in refused.value.errors() for place in error["loc"] if place in range(9)} == {0}


def test_an_object_is_read_up_to_its_first_wrong_value() -> None:
    body = {"query": "q", "documents": [{"text": "a", **{str(number): [] for number in range(9)}}]}
    with pytest.raises(ValidationError) as refused:
        kind_of("/cohere/v1/rerank", body).model_validate(body)
    assert {error["loc"][3] for error in refused.value.errors() if len(error["loc"]) > 3} == {"0"}
    with pytest.raises(Refusal, match=r"^documents\.0\.0: Input should be"):
        read("/cohere/v1/rerank", **body)


def test_equal_scores_keep_the_order_of_the_input() -> None:
    body = read("/rerank", query="q", texts=TEXTS)
    tied: Any = body.answer(RequestScores([0.5, 0.5, 0.5], "m"))
    assert [each["index"] for each in tied] == [0, 1, 2]


WORDING: dict[str, Callable[[Any], Any]] = {
    "tei": lambda body: body["error"] if body["error_type"] else "",
    "cohere": lambda body: body["message"],
    "jina": lambda body: body["detail"],
    "voyage": lambda body: body["detail"],
    "vllm": lambda body: body["error"]["message"] if body["error"]["code"] else "",
    "infinity": lambda body: body["error"]["message"],
    "shared": lambda body: body["error"]["message"] and body["detail"] and body["message"],
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_dialect_words_every_refusal_in_its_form(kind: Any) -> None:
    refusal = Refusal(kind, "what is wrong", param="texts")
    for path in PATHS:
        for dialect in [path.dialect, *(body.dialect for body in path.bodies)]:
            status = dialect.status(refusal)
            assert 400 <= status < 600
            assert status != 500
            found = dialect.error(refusal, status)
            assert WORDING[dialect.name](found) == "what is wrong"


def test_what_is_too_long_is_told_as_each_service_tells_it() -> None:
    refusal = unscorable(3, too_long("pair", 1808, 512))
    found = {
        name: WORDING[name](each.error(refusal, each.status(refusal))) for name, each in dialects().items()
    }
    for message in found.values():
        assert message.endswith(
            "text 3 cannot be scored: the pair has 1,808 tokens, and 512 are taken: shorten it"
        )
    assert found["tei"].startswith("`inputs` must have less than 512 tokens. Given: 1808;")
    assert "Please reduce the length of the input prompt." in found["vllm"]
    assert "You passed 1808 input tokens" in found["vllm"]
    assert VLLM.error(refusal, 400)["error"]["param"] == "input_tokens"
    statuses = {name: each.status(refusal) for name, each in dialects().items()}
    assert statuses == {"tei": 422, "vllm": 400, "cohere": 422, "jina": 422, "infinity": 422, "voyage": 400}
    other = unscorable(3, "the tokenizer fails")
    assert (other.kind, other.tokens) == ("unscorable", None)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"[" * 10_000_000, "not JSON"),
    ],
)
def test_a_hostile_body_is_one_clear_line(raw: bytes, reason: str) -> None:
    with pytest.raises(Refusal, match=reason) as refused:
        parse(raw)
    assert len(refused.value.message) < 500


def test_a_large_number_in_a_text_is_a_text() -> None:
    assert parse(b'{"a": "1e999", "b": 1e308}') == {"a": "1e999", "b": 1e308}


def test_a_number_that_no_answer_could_show_is_refused() -> None:
    body = parse(
        b'{"query": "q", "documents": ["a", {"text": "b", "year": -1e999}], "return_documents": true}'
    )
    with pytest.raises(Refusal, match=r"^documents\.1\.year: Input should be"):
        read("/cohere/v1/rerank", **body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"query": 1, "texts": []}, "query"),
        ({"query": "q", "texts": "a"}, "texts"),
        ({"query": "q", "texts": [1]}, r"texts\.0"),
        ({"texts": ["a"]}, "query"),
        ({"query": "q", "texts": ["x" * ((1 << 20) + 1)]}, r"texts\.0"),
        ({"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "q", "documents": [{"image": "a"}]}, "documents"),
        (
            {"query": "q", "documents": ["a"], "return_documents": True, "use_activation": "?"},
            "use_activation",
        ),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(Refusal, match=f"^{field}") as refused:
        asked("/rerank", **body)
    assert refused.value.kind == "invalid"
    assert len(refused.value.message) < 500


def forms(path: str, owner: str | None) -> list[dict[str, Any]]:
    """Bodies that differ in all that says nothing of the scale."""
    query = {"queries": "q"} if "score" in path else {"query": "q"}
    plain = {**query, "texts" if (path, owner) == ("/rerank", "tei") else "documents": TEXTS}
    extra: list[dict[str, Any]] = [
        {}, {"return_documents": False}, {"truncate_prompt_tokens": 64}, {"user": "u"}, {"top_n": 2},
        {"top_k": 2}, {"truncation": True}, {"rank_fields": ["text"]}, {"use_activation": True},
        {"model": "m"}, {"raw_scores": False},
    ]  # fmt: skip
    return [{**plain, **each} for each in extra]


@pytest.mark.parametrize("owner", [None, *dialects()])
def test_a_path_has_one_scale_whatever_the_form(owner: str | None) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score", "/v1/score"):
        scales = {asked(path, owner, **body).spec.get("activation") for body in forms(path, owner)}
        model_s_own = "score" in path or (owner == "vllm" and "reranking" not in path)
        assert scales == {None if model_s_own else "sigmoid"}, path


IDENTITY, REFUSED = {"activation": "identity"}, {"long": "refuse"}


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"return_documents": True},
        {"top_k": 2},
        {"rank_fields": ["text"]},
        {"user": "u"},
        {"texts": TEXTS},
    ],
    ids=["plain", "return_documents", "top_k", "rank_fields", "user", "texts"],
)
@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ({"use_activation": False}, IDENTITY),
        ({"raw_scores": True}, IDENTITY),
        ({"truncate": False}, REFUSED),
        ({"truncation": False}, REFUSED),
        ({"truncation": True}, {"long": "truncate"}),
        ({"truncation_direction": "Left"}, {"truncation_side": "left"}),
        ({"truncation_direction": "Right"}, {"truncation_side": "right"}),
        ({"truncation_side": "left"}, {"truncation_side": "left"}),
        ({"truncate_prompt_tokens": 64}, {"long": "truncate", "max_length": 64}),
        ({"max_tokens_per_doc": 9}, {"max_passage_tokens": 9}),
        ({"instruction": "Find."}, {"instruction": "Find."}),
    ],
    ids=lambda found: next(iter(found)),
)
def test_a_field_means_the_same_in_every_form_of_a_path(
    shape: dict[str, Any], field: dict[str, Any], meant: dict[str, Any]
) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"):
        body = {"query": "q", "documents": TEXTS, **shape, **field}
        assert asked(path, **body).spec == {"activation": "sigmoid", **meant}, path
    with pytest.raises(Refusal, match="at least 4 tokens"):
        asked("/rerank", query="q", documents=TEXTS, **shape, truncate_prompt_tokens=2)


def test_a_prefix_takes_the_fields_of_its_service_alone() -> None:
    body = {"query": "q", "documents": TEXTS, "use_activation": False, "max_tokens_per_doc": 9}
    for path in ("/jina/v1/rerank", "/infinity/rerank", "/cohere/v1/rerank", "/voyage/v1/rerank"):
        assert asked(path, **body).spec == {"activation": "sigmoid"}
    assert asked("/tei/invocations", query="q", texts=TEXTS, use_activation=False).spec == {
        "activation": "sigmoid"
    }


def test_only_what_means_a_scale_changes_it() -> None:
    raw = {"activation": "identity"}
    assert asked("/rerank", query="q", texts=TEXTS, raw_scores=True).spec == raw
    assert asked("/rerank", query="q", documents=TEXTS, raw_scores=True).spec == raw
    assert asked("/v1/rerank", query="q", documents=TEXTS, use_activation=False).spec == raw
    own = asked("/score", queries="q", documents=TEXTS, use_activation=False).spec
    assert own == {**raw, "long": "refuse"}


def test_an_owner_has_the_form_of_its_paths_too() -> None:
    body = {"query": "q", "documents": TEXTS, "return_documents": False}
    found = path_of("/rerank", "vllm")
    shown: Any = read_as(found.body(body), body).answer(SCORED)
    assert shown["id"] == "rerank-r1"
    assert [each.path for each in score_paths("vllm")].count("/rerank") == 1


@pytest.mark.parametrize("owner", [None, *dialects()])
def test_a_batch_reads_lines_as_the_path_reads_bodies(owner: str | None) -> None:
    for each in score_paths(owner):
        assert replace(path_of(certain(each.path, owner)), path=each.path) == each


def test_invocations_take_what_the_other_paths_take() -> None:
    assert answer("/invocations", query="q", texts=TEXTS)[0] == {"index": 1, "score": 0.75}
    assert asked("/invocations", inputs=["a", "b"]).rows() == [("a", "b")]
    assert answer("/vllm/invocations", query="q", documents=TEXTS)["id"] == "rerank-r1"
    assert asked("/vllm/invocations", query="q", documents=TEXTS).spec == {"long": "refuse"}
    assert asked("/invocations", data_1="q", data_2="a").spec == {"activation": "sigmoid"}


@pytest.mark.parametrize("span", [(0, 6), (6, 1)])
def test_places_outside_of_a_text_are_an_answer_that_no_worker_may_give(span: tuple[int, int]) -> None:
    found = TokensFound(text="", ids=(7,), words=("moon",), special=(False,), spans=(span,), most=512)
    with pytest.raises(Refusal, match="places outside of the text") as refused:
        simple_tokens("moon", found)
    assert refused.value.kind == "backend"
