"""Jina."""

from __future__ import annotations

from rankmill.gateway.dialects.base import (
    Body,
    Dialect,
    Document,
    Form,
    JsonObject,
    Route,
    Text,
    TextDocument,
    Top,
    texts_of,
)
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.scoring import Asked, Scored, ranked


def _error(refusal: Refusal, status: int) -> JsonObject:
    return {"detail": refusal.message}


JINA = Dialect("jina", _error, {"invalid": 422, "empty": 422})


class Rerank(Body):
    """``POST /v1/rerank``."""

    model: str | None = None
    query: Text | TextDocument
    documents: list[Document]
    top_n: Top = None
    return_documents: bool = True

    def asked(self) -> Asked:
        (query,) = texts_of([self.query])
        return Asked(query, texts_of(self.documents), self.model, {"activation": "sigmoid"})

    def answer(self, scored: Scored) -> JsonObject:
        texts = texts_of(self.documents)
        return {
            "model": scored.model,
            "object": "list",
            "usage": {"total_tokens": scored.tokens},
            "results": [
                {"index": place, "relevance_score": score}
                | ({"document": {"text": texts[place]}} if self.return_documents else {})
                for place, score in ranked(scored.scores, self.top_n)
            ],
        }


FORM = Form(JINA, Rerank)
ROUTES = Route.of(FORM, "Jina: order documents by their score with a query", "/jina/v1/rerank")
