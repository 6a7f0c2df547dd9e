"""The paths that several of the gateway's dialects have.

The gateway finds the dialect by the fields of the body, and answers in this dialect. If a body may come from
clients of several dialects, `SharedRerankV1` answers with the fields of all of them.
"""

from __future__ import annotations

from dataclasses import replace

from rankmill.extensions.gateway.dialects.base import Body, Dialect, JsonObject, Options, ScorePath
from rankmill.extensions.gateway.dialects.cohere import CohereRerankV1, CohereRerankV2, envelope
from rankmill.extensions.gateway.dialects.infinity import InfinityRerank
from rankmill.extensions.gateway.dialects.jina import JinaRerank
from rankmill.extensions.gateway.dialects.tei import (
    TEI,
    TeiOptions,
    TeiPredict,
    TeiRerank,
    TeiTokenize,
)
from rankmill.extensions.gateway.dialects.vllm import (
    ONLY_HERE,
    VLLM,
    VllmClassify,
    VllmOptions,
    VllmRerank,
    VllmScore,
    VllmTokenize,
)
from rankmill.extensions.gateway.dialects.voyage import VoyageOptions, VoyageRerank
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.score_request import RequestScores


def _error(refusal: Refusal, status: int) -> JsonObject:
    problem: JsonObject = {"message": refusal.message, "detail": refusal.message}
    return {**problem, **VLLM.error(refusal, status)}


SHARED = Dialect("shared", _error)


class SharedRerankV1(JinaRerank):
    """The body of ``POST /v1/rerank`` if its fields do not show whether the client is Cohere's, Jina's or
    vLLM's.
    """

    dialect = SHARED

    def answer(self, scores: RequestScores) -> JsonObject:
        reply = super().answer(scores)
        reply["usage"] |= {"prompt_tokens": scores.tokens}
        return {**reply, **envelope(scores, "1")}


def _rerank(body: JsonObject) -> type[Body]:
    """Choose the class of a body for ``/rerank``. A body with ``texts``, or without ``documents``, is TEI's.
    A body with ``return_documents`` or ``raw_scores`` is infinity's: infinity's client always sends one of
    these fields, and vLLM's API has neither. Any other body is vLLM's.
    """
    if "texts" in body or "documents" not in body:
        return TeiRerank
    return InfinityRerank if {"return_documents", "raw_scores"} & body.keys() else VllmRerank


def _is_vllm(body: JsonObject) -> bool:
    """Return whether only vLLM's clients can have sent this body. Clients of the other services never send 0
    as ``top_n``.
    """
    return not ONLY_HERE.isdisjoint(body) or body.get("top_n") == 0


def _rerank_v1(body: JsonObject) -> type[Body]:
    if "top_k" in body or ("truncation" in body and "top_n" not in body):
        return VoyageRerank
    if {"rank_fields", "max_chunks_per_doc"} & body.keys():
        return CohereRerankV1
    return VllmRerank if _is_vllm(body) else SharedRerankV1


def _rerank_v2(body: JsonObject) -> type[Body]:
    return VllmRerank if _is_vllm(body) else CohereRerankV2


def _invocation(body: JsonObject) -> type[Body]:
    if "inputs" in body:
        return TeiPredict
    if "texts" in body:
        return TeiRerank
    if {"input", "messages"} & body.keys():
        return VllmClassify
    return VllmRerank if "query" in body else VllmScore


def _tokenize(body: JsonObject) -> type[Body]:
    return VllmTokenize if "prompt" in body else TeiTokenize


_INVOCATIONS = (TeiRerank, TeiPredict, VllmRerank, VllmScore, VllmClassify)

_V1 = (CohereRerankV1, JinaRerank, VoyageRerank, VllmRerank)

_OPTIONS: tuple[type[Options], ...] = (TeiOptions, VllmOptions, VoyageOptions)

_PATHS = (
    ScorePath(
        "/rerank", "TEI (texts), infinity or vLLM (documents): order texts by their score with a query",
        (TeiRerank, VllmRerank, InfinityRerank), TEI, _rerank,
    ),
    ScorePath(
        "/v1/rerank", "Cohere v1, Jina, Voyage or vLLM: order documents by their score with a query",
        _V1, SHARED, _rerank_v1,
    ),
    ScorePath(
        "/v2/rerank", "Cohere v2 or vLLM: order documents by their score with a query",
        (CohereRerankV2, VllmRerank), SHARED, _rerank_v2,
    ),
    ScorePath("/reranking", "As /v1/rerank, for clients of llama.cpp", _V1, SHARED, _rerank_v1),
    ScorePath(
        "/v1/reranking", "As /v1/rerank, for clients of llama.cpp", _V1, SHARED, _rerank_v1
    ),
    ScorePath(
        "/invocations", "TEI or vLLM behind SageMaker: what their other paths take", _INVOCATIONS, TEI,
        _invocation,
    ),
)  # fmt: skip

SHARED_PATHS = {each.path: replace(each, options=_OPTIONS) for each in _PATHS}
"""Paths that several services have. The class of a request's body decides the form of the answer. The
`dialect` of the path's `ScorePath` decides the scale of the scores.
"""

SHARED_PATHS["/tokenize"] = ScorePath(
    "/tokenize", "TEI (inputs) or vLLM (prompt): the tokens of texts", (TeiTokenize, VllmTokenize), TEI,
    _tokenize,
)  # fmt: skip

INVOKED = (TEI, VLLM)
"""The dialects that have a path ``/invocations``, which SageMaker calls."""
