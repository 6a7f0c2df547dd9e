"""vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rankmill.gateway.dialects.base import (
    Body,
    Dialect,
    Document,
    JsonObject,
    Text,
    of_labels,
    ranking,
    spec_for,
    texts_of,
    usage,
)
from rankmill.gateway.refusals import Kind, Refusal, wrong
from rankmill.gateway.score_request import RequestScores, ScoreRequest, SpecFields, alone, best_first
from rankmill.jobs.contract.spec import Side

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


VLLM = Dialect("vllm", _error, {"unscorable": 400}, scale=None, long="refuse")

Some = Document | list[Document]
"""One text, or several."""

ONLY_HERE = frozenset(
    {
        "user", "request_id", "truncate_prompt_tokens", "truncation_side", "use_activation", "instruction",
        "chat_template_kwargs", "max_tokens_per_query",
    }
)  # fmt: skip
"""Fields that no other dialect has."""


Instruction = Annotated[str, Field(max_length=10_000)]


class _Kwargs(BaseModel):
    """Variables of the prompt: there is one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instruction: Instruction | None = None


class _VllmBody(Body):
    """What all of vLLM's bodies have."""

    dialect = VLLM

    model: str | None = None
    user: Annotated[str | None, Field(description="Has no effect.")] = None
    request_id: Annotated[str | None, Field(max_length=200)] = None
    priority: Annotated[int, Field(description="Has no effect.")] = 0
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1,
            description="What is longer is cut to so many tokens, -1: to the model's limit; else an error.",
        ),
    ] = None
    truncation_side: Side | None = None
    use_activation: bool | None = None

    def spec(self, owner: Dialect) -> SpecFields:
        """The spec that the options mean."""
        most = self.truncate_prompt_tokens
        if most is not None and 0 <= most < 4:
            raise wrong("truncate_prompt_tokens", "a pair has at least 4 tokens")
        return spec_for(
            owner,
            raw=self.use_activation is False,
            truncate=None if most is None else True,
            max_length=None if most == -1 else most,
            truncation_side=self.truncation_side,
        )


class _VllmOptions(_VllmBody):
    max_tokens_per_doc: Annotated[int, Field(ge=0, description="Most tokens of a document; 0: no limit.")] = 0
    max_tokens_per_query: Annotated[int, Field(ge=0, le=0, description="Queries are never cut alone.")] = 0
    instruction: Instruction | None = None
    chat_template_kwargs: _Kwargs | None = None

    def spec(self, owner: Dialect) -> SpecFields:
        """The spec that the options mean."""
        more = self.chat_template_kwargs
        of_pairs: SpecFields = {
            "max_passage_tokens": self.max_tokens_per_doc or None,
            "instruction": (more and more.instruction) or self.instruction,
        }
        given = {name: value for name, value in of_pairs.items() if value is not None}
        return super().spec(owner) | given


class VllmRerank(_VllmOptions):
    """``POST /rerank``, ``/v1/rerank``, ``/v2/rerank``."""

    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    summary = "vLLM: order documents by their score with a query"

    query: Text
    documents: Some
    top_n: Annotated[int, Field(ge=0, description="How many of the best; 0: all.")] = 0

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, _texts(self.documents), self.model, self.spec(owner))

    def answer(self, scores: RequestScores) -> JsonObject:
        shown = [{"text": text} for text in _texts(self.documents)]
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

    def score_request(self, owner: Dialect) -> ScoreRequest:
        first, second = self._sides()
        one, many = _texts(first), _texts(second)
        if len(one) == 1 and many:
            return ScoreRequest(one[0], many, self.model, self.spec(owner))
        if len(one) != len(many):
            raise Refusal(
                "invalid",
                f"{len(one)} texts cannot be scored with {len(many)}: give one, or as many as those",
            )
        return ScoreRequest(one, many, self.model, self.spec(owner))

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


class VllmClassify(_VllmBody):
    """``POST /classify``: texts alone, which get the probabilities of all labels."""

    paths = ("/classify",)
    summary = "vLLM: the probabilities of a model's labels, for texts"

    input: Text | list[Text]

    def score_request(self, owner: Dialect) -> ScoreRequest:
        texts = [self.input] if isinstance(self.input, str) else self.input
        probability: SpecFields = {"activation": "sigmoid"}
        return alone(texts, self.model, of_labels(probability | self.spec(owner)))

    def answer(self, scores: RequestScores) -> JsonObject:
        found = scores.predictions()
        return {
            "id": f"classify-{self.request_id or scores.id}",
            "object": "list",
            "created": scores.created,
            "model": scores.model,
            "data": [
                {
                    "index": place,
                    "label": best_first(row)[0][0],
                    "probs": [score for _, score in row],
                    "num_classes": len(row),
                }
                for place, row in enumerate(found)
            ],
            "usage": usage(scores),
        }


_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def _texts(some: Some) -> list[str]:
    return texts_of(some if isinstance(some, list) else [some])
