"""Voyage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rankmill.gateway.dialects.base import Body, Dialect, Form, JsonObject, Route, Text, Top
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.scoring import Asked, Scored, ranked


def _error(refusal: Refusal, status: int) -> JsonObject:
    return {"detail": refusal.message}


VOYAGE = Dialect("voyage", _error)


class Rerank(Body):
    """``POST /v1/rerank``."""

    query: Text
    documents: list[Text]
    model: str | None = None
    top_k: Top = None
    truncation: Annotated[bool, Field(description="Pairs that are too long are always truncated.")] = True
    return_documents: bool = False

    def asked(self) -> Asked:
        return Asked(self.query, self.documents, self.model, {"activation": "sigmoid"})

    def answer(self, scored: Scored) -> object:
        return {
            "object": "list",
            "data": [
                {"index": place, "relevance_score": score}
                | ({"document": self.documents[place]} if self.return_documents else {})
                for place, score in ranked(scored.scores, self.top_k)
            ],
            "model": scored.model,
            "usage": {"total_tokens": scored.tokens},
        }


FORM = Form(VOYAGE, Rerank)
ROUTES = Route.of(FORM, "Voyage: order documents by their score with a query", "/voyage/v1/rerank")
