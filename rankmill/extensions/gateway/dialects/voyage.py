"""The dialect of Voyage's rerank API."""

from __future__ import annotations

from pydantic import Field

from rankmill.extensions.gateway.dialects.base import (
    Dialect,
    Options,
    RerankBody,
    Top,
    detail_error,
    ranking,
    spec_for,
)
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest, SpecFields

VOYAGE = Dialect("voyage", detail_error, {"unscorable": 400, "too_long": 400})


class VoyageOptions(Options):
    """Fields of Voyage's request bodies that change scores."""

    truncation: bool | None = Field(
        None, description="Whether longer pairs are cut (null means true); otherwise they are an error."
    )

    def spec(self, owner: Dialect) -> SpecFields:
        return spec_for(owner, truncate=self.truncation)


class VoyageRerank(VoyageOptions, RerankBody):
    """The body of Voyage's ``POST /v1/rerank``."""

    dialect = VOYAGE
    paths = ("/v1/rerank",)
    summary = "Voyage: order documents by their score with a query"

    top_k: Top = None
    return_documents: bool = False

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts, self.model, self.spec(owner))

    def answer(self, scores: RequestScores) -> object:
        return {
            "object": "list",
            "data": ranking(scores, self.top_k, self.texts if self.return_documents else None),
            "model": scores.model,
            "usage": {"total_tokens": scores.tokens},
        }


BODIES = (VoyageRerank,)
