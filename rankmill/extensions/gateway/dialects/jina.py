"""The dialect of Jina's rerank API."""

from __future__ import annotations

from rankmill.extensions.gateway.dialects.base import (
    Body,
    Dialect,
    Document,
    JsonObject,
    Many,
    Text,
    TextDocument,
    Top,
    detail_error,
    ranking,
    spec_for,
    texts_of,
)
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest

JINA = Dialect("jina", detail_error, {"invalid": 422, "empty": 422})


class JinaRerank(Body):
    """The body of Jina's ``POST /v1/rerank``."""

    dialect = JINA
    paths = ("/v1/rerank",)
    summary = "Jina: order documents by their score with a query"

    model: str | None = None
    query: Text | TextDocument
    documents: Many[Document]
    top_n: Top = None
    return_documents: bool = True

    def score_request(self, owner: Dialect) -> ScoreRequest:
        (query,) = texts_of([self.query])
        return ScoreRequest(query, texts_of(self.documents), self.model, spec_for(owner))

    def answer(self, scores: RequestScores) -> JsonObject:
        shown = [{"text": text} for text in texts_of(self.documents)]
        return {
            "model": scores.model,
            "object": "list",
            "usage": {"total_tokens": scores.tokens},
            "results": ranking(scores, self.top_n, shown if self.return_documents else None),
        }


BODIES = (JinaRerank,)
