"""TEI: text-embeddings-inference."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import Field

from rankmill.gateway.dialects.base import Body, Dialect, JsonObject, Text
from rankmill.gateway.refusals import Kind, Refusal, wrong
from rankmill.gateway.score_request import RequestScores, ScoreRequest
from rankmill.jobs.runtime.settings import Settings

ERROR_TYPES: dict[Kind, str] = {
    "empty": "empty",
    "busy": "overloaded",
    "overloaded": "overloaded",
    "backend": "backend",
    "unavailable": "unhealthy",
    "timeout": "backend",
}
"""TEI's names of its errors; all others are ``validation``."""


def _error(refusal: Refusal, status: int) -> JsonObject:
    return {"error": refusal.message, "error_type": ERROR_TYPES.get(refusal.kind, "validation")}


TEI = Dialect("tei", _error, {"invalid": 422, "backend": 424, "timeout": 424})

LABEL = "LABEL_0"
"""Name of the only output."""

Direction = Literal["Right", "Left", "right", "left"]


def activation(*, raw: bool) -> str:
    """The activation for ``raw_scores``."""
    return "identity" if raw else "sigmoid"


def check_direction(direction: str) -> None:
    """Refuse what workers cannot do: they cut off the end of a text."""
    if direction.lower() != "right":
        raise wrong("truncation_direction", "only Right is possible here")


def known_info(settings: Settings) -> JsonObject:
    """What is known of the gateway's model and limits without the model, as HTTP and gRPC name it."""
    return {
        "version": version("rankmill"),
        "model_id": settings.model,
        "model_sha": settings.revision,
        "model_dtype": settings.precision,
        "max_concurrent_requests": settings.gateway_requests,
        "max_client_batch_size": settings.gateway_pairs,
        "max_input_length": settings.max_length,
    }


class _TeiOptions(Body):
    dialect = TEI

    truncate: bool | None = Field(None, description="Pairs that are too long are always truncated.")
    truncation_direction: Direction = "Right"
    raw_scores: bool = False

    def spec(self) -> dict[str, str | int | None]:
        """The spec that the options mean."""
        check_direction(self.truncation_direction)
        return {"activation": activation(raw=self.raw_scores)}


class TeiRerank(_TeiOptions):
    """``POST /rerank``."""

    paths = ("/rerank",)
    summary = "TEI: order texts by their score with a query"

    query: Text
    texts: list[Text]
    return_text: bool = False

    def score_request(self) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts, spec=self.spec())

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

    def score_request(self) -> ScoreRequest:
        pairs = self._pairs()
        for pair in pairs:
            if len(pair) != 2:
                raise wrong("inputs", "a pair of texts has a score, one text has none")
        return ScoreRequest([pair[0] for pair in pairs], [pair[1] for pair in pairs], spec=self.spec())

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
