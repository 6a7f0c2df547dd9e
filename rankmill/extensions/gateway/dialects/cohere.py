"""The dialect of Cohere, for versions 1 and 2 of its rerank API."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field, FiniteFloat

from rankmill.extensions.gateway.dialects.base import (
    Body,
    Dialect,
    JsonObject,
    Many,
    RerankBody,
    Text,
    Top,
    ranking,
    spec_for,
)
from rankmill.extensions.gateway.refusals import wrong
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest

_UNUSED = "max_chunks_per_doc has no effect: documents are cut at the model's limit"

_UNIT = 100
"""Number of documents that Cohere bills as one search."""

COHERE = Dialect("cohere", lambda refusal, status: {"message": refusal.message})


def envelope(scores: RequestScores, version: str, *warnings: str) -> JsonObject:
    """Return the fields ``id`` and ``meta`` of an answer to Cohere's clients. `version` is the version of
    Cohere's API.
    """
    meta: JsonObject = {
        "api_version": {"version": version},
        "billed_units": {"search_units": math.ceil(len(scores.scores) / _UNIT)},
        "tokens": {"input_tokens": scores.tokens},
    }
    return {"id": scores.id, "meta": {**meta, "warnings": list(warnings)} if warnings else meta}


class CohereRerankV2(RerankBody):
    """The body of Cohere's ``POST /v2/rerank``."""

    dialect = COHERE
    paths = ("/v2/rerank",)
    summary = "Cohere v2: order documents by their score with a query"

    top_n: Top = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1, description="Most tokens of a document.")] = None
    priority: Annotated[int, Field(description="Has no effect.")] = 0

    def score_request(self, owner: Dialect) -> ScoreRequest:
        spec = spec_for(owner, max_passage_tokens=self.max_tokens_per_doc)
        return ScoreRequest(self.query, self.texts, self.model, spec)

    def answer(self, scores: RequestScores) -> object:
        return {"results": ranking(scores, self.top_n), **envelope(scores, "2")}


Value = str | int | FiniteFloat | bool | None


def _until_wrong(document: object) -> object:
    """Return an object with only its first wrong value, or the whole object if no value is wrong. So there is
    at most one error for each object (see `Many`).
    """
    items = document.items() if isinstance(document, dict) else ()
    return next(({name: value} for name, value in items if isinstance(value, list | dict)), document)


Fields = Annotated[dict[str, Value], BeforeValidator(_until_wrong)]


class CohereRerankV1(Body):
    """The body of Cohere's ``POST /v1/rerank``."""

    dialect = COHERE
    paths = ("/v1/rerank",)
    summary = "Cohere v1: order documents by their score with a query"

    model: str | None = None
    query: Text
    documents: Many[Text | Fields]
    top_n: Top = None
    rank_fields: Many[str] | None = None
    return_documents: bool = False
    max_chunks_per_doc: Annotated[
        int | None, Field(description="Has no effect, as a warning in the answer says.")
    ] = None

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts(), self.model, spec_for(owner))

    def texts(self) -> list[str]:
        """Return the text to score for each document. If the document is an object, its text is made of the
        fields that `rank_fields` names, by default ``text``, joined by newlines.
        """
        names = self.rank_fields or ["text"]
        return [
            document if isinstance(document, str) else _text(place, document, names)
            for place, document in enumerate(self.documents)
        ]

    def answer(self, scores: RequestScores) -> object:
        shown = [{"text": document} if isinstance(document, str) else document for document in self.documents]
        warnings = [] if self.max_chunks_per_doc is None else [_UNUSED]
        results = ranking(scores, self.top_n, shown if self.return_documents else None)
        return {"results": results, **envelope(scores, "1", *warnings)}


def _text(place: int, document: dict[str, Value], names: list[str]) -> str:
    texts = [str(document[name]) for name in names if document.get(name) is not None]
    if not texts:
        raise wrong(f"documents.{place}", f"has none of the fields {', '.join(names)}")
    return "\n".join(texts)


BODIES = (CohereRerankV1, CohereRerankV2)
