"""All paths to which texts to score are sent, and whose form an error has at any path.

Several dialects share some paths: the body decides, and where it does not, the answer fits them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rankmill.gateway.dialects.base import Body, Dialect, JsonObject, ScorePath
from rankmill.gateway.dialects.cohere import CohereRerankV1, CohereRerankV2, envelope
from rankmill.gateway.dialects.infinity import InfinityRerank
from rankmill.gateway.dialects.jina import JinaRerank
from rankmill.gateway.dialects.tei import TEI, TeiPredict, TeiRerank
from rankmill.gateway.dialects.vllm import ONLY_HERE, VLLM, VllmRerank, VllmScore
from rankmill.gateway.dialects.voyage import VoyageRerank
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.score_request import RequestScores


def _error(refusal: Refusal, status: int) -> JsonObject:
    found: JsonObject = {"message": refusal.message, "detail": refusal.message}
    return {**found, **VLLM.error(refusal, status)}


SHARED = Dialect("shared", _error)


class SharedRerankV1(JinaRerank):
    """``POST /v1/rerank`` by a client of Cohere, Jina or vLLM."""

    dialect = SHARED

    def answer(self, scores: RequestScores) -> JsonObject:
        found = super().answer(scores)
        found["usage"] |= {"prompt_tokens": scores.tokens}
        return {**found, **envelope(scores, "1")}


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
    return SharedRerankV1 if ONLY_HERE.isdisjoint(body) else VllmRerank


def _rerank_v2(body: JsonObject) -> type[Body]:
    return CohereRerankV2 if ONLY_HERE.isdisjoint(body) else VllmRerank


BODIES: tuple[type[Body], ...] = (
    TeiRerank,
    TeiPredict,
    VllmScore,
    VllmRerank,
    CohereRerankV1,
    CohereRerankV2,
    JinaRerank,
    InfinityRerank,
    VoyageRerank,
)
"""All bodies that are scored."""

_SHARED: dict[str, tuple[str, Dialect, Callable[[JsonObject], type[Body]]]] = {
    "/rerank": (
        "TEI (texts), infinity or vLLM (documents): order texts by their score with a query", TEI, _rerank
    ),
    "/v1/rerank": (
        "Cohere v1, Jina, Voyage or vLLM: order documents by their score with a query", SHARED, _rerank_v1
    ),
    "/v2/rerank": ("Cohere v2 or vLLM: order documents by their score with a query", SHARED, _rerank_v2),
}  # fmt: skip
"""Paths of several bodies: a line for the documentation, the dialect of errors, and which body it is."""


def _paths() -> Iterator[ScorePath]:
    for path, (summary, dialect, choose) in _SHARED.items():
        bodies = tuple(body for body in BODIES if path in body.paths)
        yield ScorePath(path, summary, bodies, dialect, choose)
    for body in BODIES:
        for path in body.paths:
            if path not in _SHARED:
                yield ScorePath(path, body.summary, (body,), body.dialect)
            yield ScorePath(f"/{body.dialect.name}{path}", body.summary, (body,), body.dialect)


PATHS = tuple(_paths())

_BY_PATH = {"/info": TEI} | {each.path: each.dialect for each in PATHS}
DIALECTS = {body.dialect.name: body.dialect for body in BODIES}
"""By name."""


def dialect_at(path: str) -> Dialect:
    """The dialect of errors at a path, be it there or not: that of the path or of its prefix, else all."""
    return _BY_PATH.get(path) or DIALECTS.get(path.lstrip("/").partition("/")[0]) or SHARED
