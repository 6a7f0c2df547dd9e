"""A dialect of the gateway: ``{"query": ..., "texts": [...]}`` gets a list of scores in the texts' order."""

from rankmill.extensions.gateway.dialects.base import Body, Dialect, JsonObject, Text, spec_for
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest


def error(refusal: Refusal, status: int) -> JsonObject:
    """The body of an answer without scores."""
    return {"status": status, "reason": refusal.message}


PLAIN = Dialect("plain", error)


class PlainBody(Body):
    """``POST /scores``."""

    dialect = PLAIN
    paths = ("/scores",)
    summary = "Plain: score texts for a query"

    query: Text
    texts: list[Text]
    model: str | None = None

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts, self.model, spec_for(owner))

    def answer(self, scores: RequestScores) -> object:
        return scores.scores


BODIES = (PlainBody,)
