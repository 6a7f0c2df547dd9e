"""Voyage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rankmill.gateway.dialects.base import Dialect, RerankBody, Top, detail_error, ranking, spec_for
from rankmill.gateway.score_request import RequestScores, ScoreRequest

VOYAGE = Dialect("voyage", detail_error, {"unscorable": 400})


class VoyageRerank(RerankBody):
    """``POST /v1/rerank``."""

    dialect = VOYAGE
    paths = ("/v1/rerank",)
    summary = "Voyage: order documents by their score with a query"

    top_k: Top = None
    truncation: Annotated[
        bool, Field(description="Whether pairs that are too long are cut, or an error.")
    ] = True
    return_documents: bool = False

    def score_request(self, owner: Dialect) -> ScoreRequest:
        spec = spec_for(owner, truncate=None if self.truncation else False)
        return ScoreRequest(self.query, self.texts, self.model, spec)

    def answer(self, scores: RequestScores) -> object:
        return {
            "object": "list",
            "data": ranking(scores, self.top_k, self.texts if self.return_documents else None),
            "model": scores.model,
            "usage": {"total_tokens": scores.tokens},
        }
