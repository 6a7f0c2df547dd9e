"""Cohere, versions 1 and 2 of its API."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from rankmill.gateway.dialects.base import Body, Dialect, Form, JsonObject, Route, Text, Top
from rankmill.gateway.refusals import Refusal
from rankmill.gateway.scoring import Asked, Scored, ranked

_UNIT = 100
"""Documents that Cohere bills as one search."""

_ALWAYS = "passages are truncated to the model's limit"


def _error(refusal: Refusal, status: int) -> JsonObject:
    return {"message": refusal.message}


COHERE = Dialect("cohere", _error)


def envelope(scored: Scored, version: str, *warnings: str) -> JsonObject:
    """What stands beside the results."""
    units = math.ceil(len(scored.scores) / _UNIT)
    meta: JsonObject = {"api_version": {"version": version}, "billed_units": {"search_units": units}}
    return {"id": scored.id, "meta": {**meta, "warnings": list(warnings)} if warnings else meta}


class RerankV2(Body):
    """``POST /v2/rerank``."""

    model: str | None = None
    query: Text
    documents: list[Text]
    top_n: Top = None
    max_tokens_per_doc: Annotated[
        int | None, Field(description=f"Has no effect, as a warning in the answer says: {_ALWAYS}.")
    ] = None
    priority: Annotated[int, Field(description="Has no effect.")] = 0

    def asked(self) -> Asked:
        return Asked(self.query, self.documents, self.model, {"activation": "sigmoid"})

    def answer(self, scored: Scored) -> object:
        results = [
            {"index": place, "relevance_score": score} for place, score in ranked(scored.scores, self.top_n)
        ]
        warnings = _unused("max_tokens_per_doc", self.max_tokens_per_doc)
        return {"results": results, **envelope(scored, "2", *warnings)}


Value = str | int | float | bool | None
"""A field of a document."""


class RerankV1(Body):
    """``POST /v1/rerank``."""

    model: str | None = None
    query: Text
    documents: list[Text | dict[str, Value]]
    top_n: Top = None
    rank_fields: list[str] | None = None
    return_documents: bool = False
    max_chunks_per_doc: Annotated[
        int | None, Field(description=f"Has no effect, as a warning in the answer says: {_ALWAYS}.")
    ] = None

    def asked(self) -> Asked:
        return Asked(self.query, self.texts(), self.model, {"activation": "sigmoid"})

    def texts(self) -> list[str]:
        """What is scored of each document: its `rank_fields`, a line each, else its text."""
        names = self.rank_fields or ["text"]
        return [
            each if isinstance(each, str) else _text(place, each, names)
            for place, each in enumerate(self.documents)
        ]

    def answer(self, scored: Scored) -> object:
        results: list[JsonObject] = []
        for place, score in ranked(scored.scores, self.top_n):
            results.append({"index": place, "relevance_score": score})
            if self.return_documents:
                document = self.documents[place]
                results[-1]["document"] = {"text": document} if isinstance(document, str) else document
        warnings = _unused("max_chunks_per_doc", self.max_chunks_per_doc)
        return {"results": results, **envelope(scored, "1", *warnings)}


def _text(place: int, document: dict[str, Value], names: list[str]) -> str:
    found = [str(document[name]) for name in names if document.get(name) is not None]
    if not found:
        raise Refusal(
            "invalid", f"documents.{place}: has none of the fields {', '.join(names)}", param="documents"
        )
    return "\n".join(found)


def _unused(name: str, value: int | None) -> list[str]:
    return [] if value is None else [f"{name} has no effect: {_ALWAYS}"]


V1, V2 = Form(COHERE, RerankV1), Form(COHERE, RerankV2)
ROUTES = (
    *Route.of(V1, "Cohere v1: order documents by their score with a query", "/cohere/v1/rerank"),
    *Route.of(V2, "Cohere v2: order documents by their score with a query", "/cohere/v2/rerank"),
)
