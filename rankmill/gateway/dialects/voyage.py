"""Voyage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rankmill.gateway.dialects.base import Dialect, RerankBody, Top, detail_error, ranking
from rankmill.gateway.score_request import RequestScores

VOYAGE = Dialect("voyage", detail_error)


class VoyageRerank(RerankBody):
    """``POST /v1/rerank``."""

    dialect = VOYAGE
    paths = ("/v1/rerank",)
    summary = "Voyage: order documents by their score with a query"

    top_k: Top = None
    truncation: Annotated[bool, Field(description="Pairs that are too long are always truncated.")] = True
    return_documents: bool = False

    def answer(self, scores: RequestScores) -> object:
        return {
            "object": "list",
            "data": ranking(scores, self.top_k, self.documents if self.return_documents else None),
            "model": scores.model,
            "usage": {"total_tokens": scores.tokens},
        }
