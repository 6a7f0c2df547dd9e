"""The paths that several dialects have: the body decides, and where it does not, the answer fits them all."""

from __future__ import annotations

from rankmill.gateway.dialects import cohere, infinity, jina, tei, vllm, voyage
from rankmill.gateway.dialects.base import Dialect, Form, JsonObject, Route
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.scoring import Scored


def _error(refusal: Refusal, status: int) -> JsonObject:
    found: JsonObject = {"message": refusal.message, "detail": refusal.message}
    return {**found, **vllm.VLLM.error(refusal, status)}


SHARED = Dialect("shared", _error)


class RerankV1(jina.Rerank):
    """``POST /v1/rerank`` by a client of Cohere, Jina or vLLM."""

    def answer(self, scored: Scored) -> JsonObject:
        found = super().answer(scored)
        found["usage"] |= {"prompt_tokens": scored.tokens}
        return {**found, **cohere.envelope(scored, "1")}


_V1 = Form(SHARED, RerankV1)


def _rerank(body: JsonObject) -> Form:
    """TEI has ``texts``; infinity's client always sends fields that vLLM does not know."""
    if "texts" in body or "documents" not in body:
        return tei.RERANK
    return infinity.FORM if {"return_documents", "raw_scores"} & body.keys() else vllm.RERANK


def _rerank_v1(body: JsonObject) -> Form:
    if {"top_k", "truncation"} & body.keys():
        return voyage.FORM
    if {"rank_fields", "max_chunks_per_doc"} & body.keys():
        return cohere.V1
    return vllm.RERANK if vllm.is_ours(body) else _V1


def _rerank_v2(body: JsonObject) -> Form:
    return vllm.RERANK if vllm.is_ours(body) else cohere.V2


ROUTES = (
    Route(
        "/rerank",
        "TEI (texts), infinity or vLLM (documents): order texts by their score with a query",
        (tei.RERANK, infinity.FORM, vllm.RERANK),
        tei.TEI,
        _rerank,
    ),
    Route(
        "/v1/rerank",
        "Cohere v1, Jina, Voyage or vLLM: order documents by their score with a query",
        (_V1, cohere.V1, voyage.FORM, vllm.RERANK),
        SHARED,
        _rerank_v1,
    ),
    Route(
        "/v2/rerank",
        "Cohere v2 or vLLM: order documents by their score with a query",
        (cohere.V2, vllm.RERANK),
        SHARED,
        _rerank_v2,
    ),
)
