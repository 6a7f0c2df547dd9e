"""TEI: text-embeddings-inference."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import Field

from rankmill.gateway.dialects.base import Body, Dialect, JsonObject, Text, spec_for
from rankmill.gateway.refusals import Kind, Refusal, wrong
from rankmill.gateway.score_request import RequestScores, ScoreRequest
from rankmill.jobs.runtime.settings import Settings

ERROR_TYPES: dict[Kind, str] = {
    "empty": "Empty",
    "busy": "Overloaded",
    "overloaded": "Overloaded",
    "backend": "Backend",
    "unavailable": "Unhealthy",
    "timeout": "Backend",
}
"""TEI's names of its errors; all others are ``Validation``."""


def _error(refusal: Refusal, status: int) -> JsonObject:
    return {"error": refusal.message, "error_type": ERROR_TYPES.get(refusal.kind, "Validation")}


TEI = Dialect("tei", _error, {"invalid": 422, "backend": 424, "timeout": 424})

LABEL = "LABEL_0"
"""Name of the only output."""

Direction = Literal["Right", "Left", "right", "left"]


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_USUAL_LENGTH = 512
"""Told where the setting ``max_length`` leaves the limit to the model, which the gateway does not have."""

_USUAL_TOKENS = 16384


def known_info(settings: Settings, name: str) -> JsonObject:
    """The gateway's model (its public `name`) and limits, for HTTP and gRPC."""
    return {
        "version": version("rankmill"),
        "model_id": name,
        "served_model_name": name,
        "model_sha": settings.revision,
        "model_dtype": _DTYPES.get(settings.precision, settings.precision),
        "max_concurrent_requests": settings.gateway_requests,
        "max_client_batch_size": settings.gateway_pairs,
        "max_input_length": settings.max_length or _USUAL_LENGTH,
        "max_batch_tokens": settings.token_budget
        if isinstance(settings.token_budget, int)
        else _USUAL_TOKENS,
        "tokenization_workers": 1,
    }


class _TeiOptions(Body):
    dialect = TEI

    truncate: bool | None = Field(
        None, description="Whether pairs that are too long are cut, or an error; null: they are cut."
    )
    truncation_direction: Direction = "Right"
    raw_scores: bool = False

    def spec(self, owner: Dialect) -> dict[str, str | int]:
        """The spec that the options mean."""
        side = "left" if self.truncation_direction.lower() == "left" else None
        return spec_for(owner, raw=self.raw_scores, truncate=self.truncate, truncation_side=side)


class TeiRerank(_TeiOptions):
    """``POST /rerank``."""

    paths = ("/rerank",)
    summary = "TEI: order texts by their score with a query"

    query: Text
    texts: list[Text]
    return_text: bool = False

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts, spec=self.spec(owner))

    def answer(self, scores: RequestScores) -> object:
        found = [{"index": place, "score": score} for place, score in scores.ranked()]
        if self.return_text:
            return [{**each, "text": self.texts[int(each["index"])]} for each in found]
        return found


class TeiPredict(_TeiOptions):
    """``POST /predict``; each input is a pair, as a worker scores nothing else."""

    paths = ("/predict",)
    summary = "TEI: score pairs of texts"

    inputs: Annotated[
        Text | list[Text] | list[list[Text]],
        Field(description="A pair of texts, or several; a single text has no score here."),
    ]

    def score_request(self, owner: Dialect) -> ScoreRequest:
        pairs = self._pairs()
        for pair in pairs:
            if len(pair) != 2:
                raise wrong("inputs", "a pair of texts has a score, one text has none")
        return ScoreRequest([pair[0] for pair in pairs], [pair[1] for pair in pairs], spec=self.spec(owner))

    def answer(self, scores: RequestScores) -> object:
        found = [[{"score": score, "label": LABEL}] for score in scores.scores]
        return found if self._is_batch() else found[0]

    def _is_batch(self) -> bool:
        return isinstance(self.inputs, list) and not all(isinstance(each, str) for each in self.inputs)

    def _pairs(self) -> list[list[str]]:
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        if not self._is_batch():
            return [[str(each) for each in self.inputs]] if self.inputs else []
        return [list(each) for each in self.inputs]
