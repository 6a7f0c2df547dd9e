"""All paths to which texts to score are sent, and whose form an error has at any path.

Several dialects share some paths: the body decides, and where it does not, the answer fits them all.
"""

from __future__ import annotations

from rankmill.gateway.dialects import cohere, infinity, jina, tei, vllm, voyage
from rankmill.gateway.dialects.base import Body, Dialect, JsonObject, ScorePath
from rankmill.gateway.dialects.cohere import CohereRerankV1, CohereRerankV2
from rankmill.gateway.dialects.infinity import InfinityRerank
from rankmill.gateway.dialects.jina import JinaRerank
from rankmill.gateway.dialects.tei import TeiRerank
from rankmill.gateway.dialects.vllm import VllmRerank
from rankmill.gateway.dialects.voyage import VoyageRerank
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.score_request import RequestScores


def _error(refusal: Refusal, status: int) -> JsonObject:
    found: JsonObject = {"message": refusal.message, "detail": refusal.message}
    return {**found, **vllm.VLLM.error(refusal, status)}


SHARED = Dialect("shared", _error)


class SharedRerankV1(JinaRerank):
    """``POST /v1/rerank`` by a client of Cohere, Jina or vLLM."""

    dialect = SHARED

    def answer(self, scores: RequestScores) -> JsonObject:
        found = super().answer(scores)
        found["usage"] |= {"prompt_tokens": scores.tokens}
        return {**found, **cohere.envelope(scores, "1")}


def _rerank(body: JsonObject) -> type[Body]:
    """TEI has ``texts``; infinity's client always sends fields that vLLM does not know."""
    if "texts" in body or "documents" not in body:
        return TeiRerank
    return InfinityRerank if {"return_documents", "raw_scores"} & body.keys() else VllmRerank


def _rerank_v1(body: JsonObject) -> type[Body]:
    if {"top_k", "truncation"} & body.keys():
        return VoyageRerank
    if {"rank_fields", "max_chunks_per_doc"} & body.keys():
        return CohereRerankV1
    return SharedRerankV1 if vllm.ONLY_HERE.isdisjoint(body) else VllmRerank


def _rerank_v2(body: JsonObject) -> type[Body]:
    return CohereRerankV2 if vllm.ONLY_HERE.isdisjoint(body) else VllmRerank


PATHS = (
    ScorePath(
        "/rerank",
        "TEI (texts), infinity or vLLM (documents): order texts by their score with a query",
        (TeiRerank, InfinityRerank, VllmRerank),
        tei.TEI,
        _rerank,
    ),
    ScorePath(
        "/v1/rerank",
        "Cohere v1, Jina, Voyage or vLLM: order documents by their score with a query",
        (SharedRerankV1, CohereRerankV1, VoyageRerank, VllmRerank),
        SHARED,
        _rerank_v1,
    ),
    ScorePath(
        "/v2/rerank",
        "Cohere v2 or vLLM: order documents by their score with a query",
        (CohereRerankV2, VllmRerank),
        SHARED,
        _rerank_v2,
    ),
    *tei.PATHS,
    *cohere.PATHS,
    *jina.PATHS,
    *vllm.PATHS,
    *infinity.PATHS,
    *voyage.PATHS,
)

_BY_PATH = {"/info": tei.TEI} | {each.path: each.dialect for each in PATHS}
DIALECTS = {body.dialect.name: body.dialect for each in PATHS for body in each.bodies}
"""By name."""


def dialect_at(path: str) -> Dialect:
    """The dialect of errors at a path, be it there or not: that of the path or of its prefix, else all."""
    return _BY_PATH.get(path) or DIALECTS.get(path.lstrip("/").partition("/")[0]) or SHARED
