"""The dialect of infinity, a server that serves reranking models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rankmill.extensions.gateway.dialects.base import (
    Dialect,
    Document,
    JsonObject,
    Many,
    RerankBody,
    Top,
    ranking,
    spec_for,
    usage,
)
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest

_NO_MODEL = "default/not-specified"
"""What infinity's client sends as the model's name if its caller names no model."""


def _error(refusal: Refusal, status: int) -> JsonObject:
    problem = {"message": refusal.message, "type": refusal.kind, "param": refusal.param, "code": status}
    return {"error": problem}


INFINITY = Dialect("infinity", _error, {"invalid": 422, "empty": 422})


class InfinityRerank(RerankBody):
    """The body of infinity's ``POST /rerank``."""

    dialect = INFINITY
    paths = ("/rerank",)
    summary = "infinity: order documents by their score with a query"

    documents: Annotated[Many[Document], Field(min_length=1)]
    return_documents: bool = False
    raw_scores: bool = False
    top_n: Top = None

    def score_request(self, owner: Dialect) -> ScoreRequest:
        model = None if self.model == _NO_MODEL else self.model
        return ScoreRequest(self.query, self.texts, model, spec_for(owner, raw=self.raw_scores))

    def answer(self, scores: RequestScores) -> object:
        shown = self.texts if self.return_documents else None
        return {
            "object": "rerank",
            "id": f"infinity-{scores.id}",
            "created": scores.created,
            "model": scores.model,
            "usage": usage(scores),
            "results": ranking(scores, self.top_n, shown),
        }


BODIES = (InfinityRerank,)
