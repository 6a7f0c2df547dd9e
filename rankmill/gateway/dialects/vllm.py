"""vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rankmill.gateway.dialects.base import (
    Body,
    Dialect,
    Document,
    JsonObject,
    Scale,
    Text,
    activation,
    ranking,
    texts_of,
    usage,
)
from rankmill.gateway.refusals import Kind, Refusal, wrong
from rankmill.gateway.score_request import RequestScores, ScoreRequest

_TYPES: dict[Kind, str] = {
    "no_model": "NotFoundError",
    "not_found": "NotFoundError",
    "conflict": "ConflictError",
    "no_key": "Unauthorized",
    "forbidden": "Forbidden",
    "busy": "TooManyRequestsError",
    "overloaded": "TooManyRequestsError",
    "backend": "InternalServerError",
    "unavailable": "ServiceUnavailableError",
    "timeout": "GatewayTimeoutError",
}


def _error(refusal: Refusal, status: int) -> JsonObject:
    kind = _TYPES.get(refusal.kind, "BadRequestError")
    found = {"message": refusal.message, "type": kind, "param": refusal.param, "code": status}
    return {"error": found}


VLLM = Dialect("vllm", _error, {"unscorable": 400}, scale=None)

Some = Document | list[Document]
"""One text, or several."""

ONLY_HERE = frozenset({"user", "request_id", "truncate_prompt_tokens", "use_activation", "instruction"})
"""Fields that no other dialect has."""


class _VllmOptions(Body):
    dialect = VLLM

    model: str | None = None
    user: Annotated[str | None, Field(description="Has no effect.")] = None
    request_id: Annotated[str | None, Field(max_length=200)] = None
    priority: Annotated[int, Field(description="Has no effect.")] = 0
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, description="Most tokens of a pair; -1: the model's limit.")
    ] = None
    use_activation: bool | None = None
    instruction: Annotated[str | None, Field(max_length=10_000)] = None

    def spec(self, scale: Scale) -> dict[str, str | int | None]:
        """The spec that the options mean."""
        most = self.truncate_prompt_tokens
        if most is not None and 0 <= most < 4:
            raise wrong("truncate_prompt_tokens", "a pair has at least 4 tokens")
        found: dict[str, str | int | None] = {
            **activation("identity" if self.use_activation is False else scale)
        }
        if most is not None and most > 0:
            found["max_length"] = most
        if self.instruction is not None:
            found["instruction"] = self.instruction
        return found


class VllmRerank(_VllmOptions):
    """``POST /rerank``, ``/v1/rerank``, ``/v2/rerank``."""

    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    summary = "vLLM: order documents by their score with a query"

    query: Text
    documents: list[Document]
    top_n: Annotated[int, Field(ge=0, description="How many of the best; 0: all.")] = 0

    def score_request(self, scale: Scale) -> ScoreRequest:
        return ScoreRequest(self.query, texts_of(self.documents), self.model, self.spec(scale))

    def answer(self, scores: RequestScores) -> JsonObject:
        shown = [{"text": text} for text in texts_of(self.documents)]
        return {
            "id": f"rerank-{self.request_id or scores.id}",
            "model": scores.model,
            "usage": usage(scores),
            "results": ranking(scores, self.top_n or None, shown),
        }


class VllmScore(_VllmOptions):
    """``POST /score``, ``/v1/score``: one text with one or several, or as many with as many."""

    paths = ("/score", "/v1/score")
    summary = "vLLM: score pairs of texts"

    queries: Some | None = None
    documents: Some | None = None
    items: Some | None = None
    data_1: Some | None = None
    data_2: Some | None = None
    text_1: Some | None = None
    text_2: Some | None = None

    def score_request(self, scale: Scale) -> ScoreRequest:
        first, second = self._sides()
        one, many = _texts(first), _texts(second)
        if len(one) == 1 and many:
            return ScoreRequest(one[0], many, self.model, self.spec(scale))
        if len(one) != len(many):
            raise Refusal(
                "invalid",
                f"{len(one)} texts cannot be scored with {len(many)}: give one, or as many as those",
            )
        return ScoreRequest(one, many, self.model, self.spec(scale))

    def answer(self, scores: RequestScores) -> JsonObject:
        return {
            "id": f"score-{self.request_id or scores.id}",
            "object": "list",
            "created": scores.created,
            "model": scores.model,
            "data": [
                {"index": place, "object": "score", "score": score}
                for place, score in enumerate(scores.scores)
            ],
            "usage": usage(scores),
        }

    def _sides(self) -> tuple[Some, Some]:
        for names in _SIDES:
            first, second = (getattr(self, name) for name in names)
            if first is not None and second is not None:
                return first, second
        pairs = ", ".join(" and ".join(names) for names in _SIDES)
        raise Refusal("invalid", f"the texts to score are missing: give {pairs}")


_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def _texts(some: Some) -> list[str]:
    return texts_of(some if isinstance(some, list) else [some])
