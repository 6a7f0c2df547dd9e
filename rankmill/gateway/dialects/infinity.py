"""infinity."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rankmill.gateway.dialects.base import Body, Dialect, Form, JsonObject, Route, Text, Top
from rankmill.gateway.dialects.tei import activation
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.scoring import Asked, Scored, ranked

_NO_MODEL = "default/not-specified"
"""What its client sends if no model is named."""


def _error(refusal: Refusal, status: int) -> JsonObject:
    found = {"message": refusal.message, "type": refusal.kind, "param": refusal.param, "code": status}
    return {"error": found}


INFINITY = Dialect("infinity", _error, {"invalid": 422, "empty": 422})


class Rerank(Body):
    """``POST /rerank``."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1)]
    return_documents: bool = False
    raw_scores: bool = False
    model: str | None = None
    top_n: Top = None

    def asked(self) -> Asked:
        model = None if self.model == _NO_MODEL else self.model
        return Asked(self.query, self.documents, model, {"activation": activation(raw=self.raw_scores)})

    def answer(self, scored: Scored) -> object:
        return {
            "object": "rerank",
            "id": f"infinity-{scored.id}",
            "created": scored.created,
            "model": scored.model,
            "usage": {"prompt_tokens": scored.tokens, "total_tokens": scored.tokens},
            "results": [
                {"index": place, "relevance_score": score}
                | ({"document": self.documents[place]} if self.return_documents else {})
                for place, score in ranked(scored.scores, self.top_n)
            ],
        }


FORM = Form(INFINITY, Rerank)
ROUTES = Route.of(FORM, "infinity: order documents by their score with a query", "/infinity/rerank")
